"""`ledger.jsonl`: a line a step, and before them, at each start of the run, a line of what makes the order.

The file is never longer than what can be proved: at a resume it is cut back to the step of the checkpoint.
What a power cut took of it is made again from the order of samples, which is no forgery: the digest in the
checkpoint is of exactly those lines, or they are not written.
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cyxjax.data.ledger import Ledger, StreamFacts, expected_step
from cyxjax.errors import DataError
from cyxjax.files import append

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class Entry(NamedTuple):
    """One recorded step: the order it was read in, and the ledger after it."""

    facts: StreamFacts
    ledger: Ledger


class Cut(NamedTuple):
    """What was done to a ledger so that it ends at a checkpoint. `missing`: steps nobody can tell of."""

    taken_back: int = 0  # steps after the checkpoint's, to be made again
    made_again: int = 0  # steps whose lines were lost, written again and proved
    missing: int = 0
    torn: bool = False  # something in it was no line of ours


def refuse_link(path: Path) -> None:
    """Raises: DataError if `path` is there and is no plain file: what a link points to is not ours."""
    try:
        if stat.S_ISREG(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    raise DataError(f"{path} is a link or a special file; a ledger is a plain file. HINT: remove it.")


def begin(path: Path) -> None:
    """Makes room for the ledger of a new run: one of an earlier run is kept as `*.old`. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        path.replace(path.with_name(path.name + ".old"))


def line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"


def cut_back(path: Path, end: Ledger, facts: StreamFacts) -> Cut:
    """Makes the file end at the step of `end`, the ledger of a checkpoint, and puts it on the disk.

    facts: of the order, where the file does not say them itself.
    Raises: OSError; DataError for a link.
    """
    refuse_link(path)
    data = path.read_bytes() if path.exists() else b""
    found = _end_of(data, end)
    if found is not None:
        taken_back = data.count(b'"digest"', found)
        if found < len(data):
            _truncate(path, found)
        return Cut(taken_back)
    length, before = _sound(data, facts)
    torn = length < len(data)
    if before.ledger.steps >= end.steps:  # the record of another run
        begin(path)
        length, before = 0, Entry(facts, Ledger())
    else:
        _truncate(path, length)
    lost = _lost(before, end)
    if lost is None:
        return Cut(0, 0, end.steps - before.ledger.steps, torn)
    head = "" if length else line(facts._asdict())
    append(path, (head + "".join(line(ledger.to_json()) for ledger in lost)).encode())
    return Cut(0, len(lost), 0, torn)


def _end_of(data: bytes, end: Ledger) -> int | None:
    """One past the newest line of `end`, if all before it are lines; None if it or they are not there."""
    at = data.rfind(f'"digest": "{end.digest}"'.encode())
    stop = data.find(b"\n", at) + 1
    if at < 0 or not stop or b"\0" in data[:stop]:
        return None
    whole = data[:stop]
    # Every line begins and ends as an object does: counted, as a parse of millions of lines takes minutes.
    if not whole.startswith(b"{") or whole.count(b"}\n{") + 1 != whole.count(b"\n"):
        return None
    try:
        found = Ledger.from_json(json.loads(whole[whole.rfind(b"\n", 0, stop - 1) + 1 :]))
    except ValueError:  # DataError is one
        return None
    return stop if found == end else None


def _sound(data: bytes, facts: StreamFacts) -> tuple[int, Entry]:
    """(length, last entry) of the part of a file before the first thing that is no line of ours."""
    length, last = 0, Entry(facts, Ledger())
    for text in data.splitlines(keepends=True):
        try:
            value = json.loads(text)
            if (
                not text.endswith(b"\n")
                or not isinstance(value, dict)
                or (not length and "seed" not in value)
            ):
                break
            is_start = "seed" in value
            last = (
                Entry(_facts(value), last.ledger) if is_start else Entry(last.facts, Ledger.from_json(value))
            )
        except (ValueError, TypeError, RecursionError):
            break
        length += len(text)
    return length, last


def _lost(before: Entry, end: Ledger) -> list[Ledger] | None:
    """The ledgers after `before` up to `end`, made from the order; None if they do not lead to `end`."""
    facts, ledger = before
    placed = end.first is not None
    whole = facts.plan().num_used
    first = ledger.samples - ledger.epoch * whole
    if ledger.first is not None:
        first = ledger.first + ledger.last.num_samples
    epoch, made = ledger.epoch, []
    for _ in range(end.steps - ledger.steps):
        if not facts.plan(first).num_steps:
            epoch, first = epoch + 1, 0
        ledger = expected_step(facts, ledger, epoch, first, placed)
        first = facts.plan(first).stop(0)
        made.append(ledger)
    return made if ledger == end else None


def _truncate(path: Path, length: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | _NO_LINK)
    except FileNotFoundError:
        return
    try:
        os.ftruncate(fd, length)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_entries(path: Path) -> list[Entry]:
    """All records of a ledger file in the order they were written, each with the facts that hold for it.

    A last line that a crash cut short is left out.
    Raises: DataError for anything that `LedgerHook` does not write.
    """
    refuse_link(path)
    entries, facts = [], None
    for number, value in _lines(path):
        if "seed" in value:
            facts = _facts(value, f"{path}:{number}")
        elif facts is None:
            raise DataError(
                f"{path}:{number}: a step before the order of samples. HINT: it was not written by cyxjax."
            )
        else:
            entries.append(Entry(facts, Ledger.from_json(value)))
    return entries


def taken_back(path: Path) -> int:
    """How many recorded steps were made again after a restart, as the starts of the run noted it."""
    return sum(value.get("taken_back", 0) for _, value in _lines(path) if "seed" in value)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    texts: Iterable[str] = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, text in enumerate(texts, 1):
        if text.endswith("\n"):
            yield number, _parsed(path, number, text)


def _parsed(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}:{number}: {error}. HINT: a power cut can tear it: a resume of the run cuts it back to "
            "its checkpoint."
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number} is no record. HINT: it was not written by cyxjax.")
    return value


def _facts(value: dict[str, Any], where: str = "ledger") -> StreamFacts:
    known = {name: value.get(name) for name in StreamFacts._fields}
    if not all(isinstance(v, int) for v in value.values()) or None in known.values():
        raise DataError(f"{where} is no record. HINT: it was not written by cyxjax.")
    facts = StreamFacts(**known)  # type: ignore[arg-type]
    facts.plan()  # sizes that can be
    return facts
