"""What a person reads when a start has failed: one line per rank, then the first error, last and alone."""

import os
from collections.abc import Sequence
from dataclasses import asdict

from cyxjax.launch import output
from cyxjax.launch.failure.record import ErrorRecord, write_json

FILE = "first_error.json"
_STDERR_LINES = 20


def first_of(records: Sequence[ErrorRecord], ended_early: Sequence[int] = ()) -> ErrorRecord:
    """The error the others follow from: the earliest that is not itself a consequence.

    ended_early: ranks that left with exit code 0 before the rest failed. Where all records are
    consequences, such a rank is their cause: it will not join the others' collectives.
    """
    primary = [record for record in records if not record.secondary]
    if not primary and ended_early:
        rank = min(ended_early)
        waited = ", ".join(f"rank {r.rank} was in step {r.step}" for r in records)
        message = f"rank {rank} ended with exit code 0 while others went on ({waited})"
        return ErrorRecord(rank, "EarlyEnd", message, host=records[0].host, start=records[0].start)
    return min(primary or records, key=lambda record: record.at_monotonic_s)


def tell(
    first: ErrorRecord, others: Sequence[ErrorRecord], killed: Sequence[int], record_file: str, then: str
) -> None:
    """Prints the outcome of a failed start on standard error. then: what happens next, in one line."""
    for record in sorted(others, key=lambda r: r.rank):
        output.say(f"rank {record.rank} followed: {_one_line(record.summary)}")
    if killed:
        output.say(f"ended with it: {output.ranks(killed)}")
    at = f", at step {first.step}" if first.step >= 0 else ""
    phase = f" in {first.phase}" if first.phase and first.step >= 0 else ""
    output.say(f"{then}; record: {record_file}")
    how = "could not go on after a failure elsewhere" if first.secondary else "failed first"
    output.say(f"rank {first.rank} {how} (host {first.host}, pid {first.pid}{at}{phase})")
    output.show(body(first))


def body(record: ErrorRecord) -> str:
    """The traceback; without one, what the rank last wrote to standard error and how it ended.

    All ranks' stacks after a hang are in the record only: they fill screens.
    """
    if record.says_all and not record.secondary:
        return f"{record.type}: {record.message}\n"
    if record.traceback and not record.secondary:  # a consequence's own traceback leads nowhere
        return record.traceback
    tail = "".join(f"  | {line}\n" for line in record.stderr_tail[-_STDERR_LINES:])
    return f"{tail}{record.type}: {record.message}\n"


def save(first: ErrorRecord, folder: str) -> str:
    """Writes `first` to `folder`/first_error.json; returns the path, or why there is none."""
    path = os.path.join(folder, FILE)
    try:
        write_json(path, asdict(first))
    except OSError as error:
        return f"none ({path}: {error.strerror})"
    return path


def _one_line(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."
