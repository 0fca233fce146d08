"""Records of errors, in one JSON file per failed rank, and what a failed start prints: one line per rank,
then the first error alone, at the end.
"""

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from cyxjax.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPT,
    EXIT_SECONDARY,
    EXIT_USER_ERROR,
    ConfigError,
    CyxjaxError,
)
from cyxjax.files import PRIVATE, is_installed, text_in, write_whole
from cyxjax.launch import output
from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.output import ranks_text
from cyxjax.redaction import redact

VARIABLE = "CYXJAX_ERROR_FILE"
FIRST_ERROR = "first_error.json"
# Texts of errors that a rank gets because another rank, or the network, failed first.
# jax raises them as JaxRuntimeError or, from a conversion to numpy, as a plain ValueError.
_SECONDARY = re.compile(
    r"^(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): .*"
    r"(Gloo|NCCL|Connection (reset|closed)|Socket closed|coordination|[Hh]eartbeat)",
    re.DOTALL,
)

_MEANING = {
    "SIGKILL": " (killed from outside; by the kernel if memory ran out, see `dmesg`)",
    "SIGSEGV": " (invalid memory access in native code)",
    "SIGABRT": " (native code gave up; its message is in the last lines of stderr)",
}


class PeerLost(RuntimeError):
    """Another rank ended, or its host cannot be reached: this rank cannot continue."""


@dataclass
class ErrorRecord:
    """One rank's error. `secondary`: only a consequence of another rank's. Times are seconds.

    at_monotonic_s: on the host's monotonic clock, to order the records of one host. says_all: an error of
    cyxjax's own, whose message is enough for people: its traceback is only in the file.
    source: file:line and function of the last frame that is not in an installed package.
    """

    rank: int
    type: str
    message: str
    secondary: bool = False
    exit_code: int = EXIT_USER_ERROR
    host: str = ""
    pid: int = 0
    start: int = 0
    step: int = -1
    phase: str = ""
    at_s: float = 0.0
    at_monotonic_s: float = 0.0
    source: str = ""
    traceback: str = ""
    says_all: bool = False
    stderr_tail: list[str] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """'ValueError: no such file (train.py:88 load)' in one line."""
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        text = f"{self.type}: {first}" if first else self.type
        return f"{text} ({self.source})" if self.source else text

    @property
    def signature(self) -> tuple[str, str, str, int]:
        """Equal for the same error at the same place and step: a bug that a restart does not fix."""
        return (self.type, self.message, self.source, self.step)


def of_exception(
    error: BaseException, *, rank: int, progress: Progress, start: int = 0, code: int = 0
) -> ErrorRecord:
    """The record of an exception that ended this process's training.

    code: the exit code of an error that does not follow from a peer's; 0: that of its class.
    """
    secondary = is_secondary(error)
    return ErrorRecord(
        rank=rank,
        type=type(error).__name__,
        message=redact(_str(error)),
        secondary=secondary,
        exit_code=EXIT_SECONDARY if secondary else code or exit_code(error),
        host=socket.gethostname(),
        pid=os.getpid(),
        start=start,
        step=progress.step,
        phase=progress.phase,
        at_s=time.time(),
        at_monotonic_s=time.monotonic(),
        source=source_of(error),
        traceback=redact("".join(traceback.format_exception(error))),
        says_all=isinstance(error, CyxjaxError),
    )


def of_status(rank: int, pid: int, returncode: int, progress: Progress, start: int) -> ErrorRecord:
    """The record of a process that ended without leaving one: killed by a signal, or by its own exit."""
    kind, message, code = "exit", f"ended with exit code {returncode}", returncode
    if returncode < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        kind, code = names.get(-returncode, f"signal {-returncode}"), EXIT_INFRASTRUCTURE
        message = f"ended by signal {-returncode}{_MEANING.get(kind, '')}"
    return ErrorRecord(
        rank,
        kind,
        message,
        secondary=returncode == EXIT_SECONDARY,
        exit_code=code,
        host=socket.gethostname(),
        pid=pid,
        start=start,
        step=progress.step,
        phase=progress.phase,
        at_s=time.time(),
        at_monotonic_s=time.monotonic(),
    )


def is_secondary(error: BaseException) -> bool:
    """True for an error that a healthy rank gets when a peer or the network fails, also as a cause."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, PeerLost) or _SECONDARY.search(_str(link)):
            return True
        link = link.__cause__
    return False


def _str(error: BaseException) -> str:
    """str(error), or a text in its place if that raises: the rank must end all the same."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__}.__str__ failed>"


def exit_code(error: BaseException) -> int:
    """The code a command ends with for `error` (see cyxjax.errors)."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_INTERRUPT if isinstance(error, KeyboardInterrupt) else EXIT_USER_ERROR


def source_of(error: BaseException) -> str:
    """'train.py:88 load' of the innermost frame outside installed packages; '' without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_installed(frame.filename)] or list(frames)
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} {own[-1].name}" if own else ""


def save(record: ErrorRecord, path: str) -> None:
    """Writes `record` to `path` whole or not at all, readable by this user only."""
    write_whole(path, json.dumps(asdict(record), indent=1) + "\n", mode=PRIVATE)


def load(path: str) -> ErrorRecord | None:
    """The record in `path`; None when the process ended before it could write one."""
    try:
        return ErrorRecord(**json.loads(text_in(path)))
    except (ValueError, TypeError):  # absent, or cut off by SIGKILL: same as none
        return None


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
        message = f"rank {rank} ended with exit code 0 while others continued ({waited})"
        return ErrorRecord(rank, "EarlyEnd", message, host=records[0].host, start=records[0].start)
    return min(primary or records, key=lambda record: record.at_monotonic_s)


def show_failure(
    first: ErrorRecord, others: Sequence[ErrorRecord], killed: Sequence[int], record_file: str, then: str
) -> None:
    """Prints the outcome of a failed start on standard error. then: what happens next, in one line."""
    for record in sorted(others, key=lambda r: r.rank):
        output.say(f"rank {record.rank} followed: {record.summary}")
    if killed:
        output.say(f"ended with it: {ranks_text(killed)}")
    at = f", at step {first.step}" if first.step >= 0 else ""
    phase = f" in {first.phase}" if first.phase and first.step >= 0 else ""
    output.say(f"{then}; record of the first error: {record_file}")
    how = "could not continue after a failure elsewhere" if first.secondary else "failed first"
    output.say(f"rank {first.rank} {how} (host {first.host}, pid {first.pid}{at}{phase})")
    output.show(text_of(first))


def text_of(record: ErrorRecord) -> str:
    """The traceback; without one, what the rank last wrote to standard error and how it ended.

    All ranks' stacks after a hang are in the record only: they fill screens.
    """
    if record.says_all and not record.secondary:
        return f"{record.type}: {record.message}\n"
    if record.traceback and not record.secondary:  # the traceback of a consequence does not help
        return record.traceback
    tail = "".join(f"  | {line}\n" for line in record.stderr_tail[-_STDERR_LINES:])
    return f"{tail}{record.type}: {record.message}\n"


def save_first(first: ErrorRecord, folder: str) -> str:
    """Writes `first` to `folder`/first_error.json; returns the path.

    Hosts may share the folder, and each writes at the same moment: a consequence replaces no record.
    Raises: OSError.
    """
    path = os.path.join(folder, FIRST_ERROR)
    if first.secondary:
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w") as file,
        ):
            json.dump(asdict(first), file, indent=1)
    else:
        save(first, path)
    return path
