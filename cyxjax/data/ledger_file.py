"""`ledger.jsonl`: one line per span of steps, and one with the order of samples at each start of a run.

The record of a run that continues from a state of another run begins at the place of that state (`begins`).
On resume the file is truncated to the position of the checkpoint. Lines that are missing or damaged before it
are written again from the order of samples, if the result has the sum of all ids that the checkpoint holds.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from cyxjax.data.ledger import BEGINNING, Place, Record, Span, StreamFacts, Tally, span_of_step
from cyxjax.errors import DataError
from cyxjax.files import append, sync


class Cut(NamedTuple):
    """What a resume did to the file."""

    taken_back: int = 0  # steps after the checkpoint, which will be run again
    made_again: int = 0  # steps whose lines were lost or damaged, and were written again and checked
    missing: int = 0  # steps whose lines could not be written again
    total: int | None = None  # of all ids up to the checkpoint, if the file has it


class _Line(NamedTuple):
    """A valid line of the file: where it ends, and the state after it."""

    end: int
    facts: StreamFacts
    span: Span | None  # None: the start of a run
    tally: Tally
    taken_back: int = 0
    begins: Place = BEGINNING  # of the record; in its first line


def refuse_link(path: Path) -> None:
    """Raises: DataError if `path` exists and is not a regular file: the target of a link is not ours."""
    if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.stat().st_mode)):
        raise DataError(f"{path} is a link or a special file; a ledger is a plain file. HINT: remove it.")


def begin(path: Path) -> None:
    """Makes room for the ledger of a new run: one of an earlier run is kept as `*.old`. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        path.replace(path.with_name(path.name + ".old"))


def line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"


def first_line(facts: StreamFacts, begins: Place) -> dict[str, Any]:
    """The first line of a record that begins at `begins`. facts: of the order up to there."""
    return facts._asdict() | ({} if begins == BEGINNING else {"begins": begins})


def cut_back(
    path: Path, end: Tally, place: tuple[int, int], facts: StreamFacts, begins: Place = BEGINNING
) -> Cut:
    """Truncates the file to the checkpoint whose tally is `end`, and syncs it to disk.

    place: (epoch, samples) of the checkpoint. facts: of its order. begins: where its record begins.
    Raises: OSError; DataError for a link.
    """
    refuse_link(path)
    lines, _ = _parsed(path.read_bytes() if path.exists() else b"")
    last = next((one for one in reversed(lines) if one.tally.same(end)), None)
    if last is not None:
        _truncate(path, last.end)
        return Cut(taken_back=lines[-1].tally.steps - end.steps, total=last.tally.total)
    for kept in (lines, []):  # []: the whole file is from another run, or has a damaged value
        lost = _lost(kept, end, place, facts, begins)
        if lost is not None:
            if kept:
                _truncate(path, kept[-1].end)
            else:
                begin(path)
            first = facts._asdict() if kept else first_line(facts, begins)
            append(path, "".join(map(line, [first, *(span.to_json() for span in lost)])).encode())
            return Cut(made_again=sum(span.steps for span in lost))
    left = [one for one in lines if one.tally.steps <= end.steps]
    _truncate(path, left[-1].end if left else 0)
    return Cut(missing=end.steps - (left[-1].tally.steps if left else 0))


def _lost(
    kept: list[_Line], end: Tally, place: tuple[int, int], facts: StreamFacts, begins: Place
) -> list[Span] | None:
    """The spans after `kept` up to `place`, from the order; None if their tally is not `end`."""
    last = next((one.span for one in reversed(kept) if one.span is not None), None)
    tally = kept[-1].tally if kept else Tally()
    epoch, first = (last.epoch, last.stop) if last else begins
    made: list[Span] = []
    while (epoch, first) < place and tally.steps < end.steps:
        plan = facts.plan(first)
        stop, steps = first + plan.num_used, plan.num_steps
        if epoch == place[0]:
            stop, steps = place[1], end.steps - tally.steps
        if stop > first:
            made.append(Span(epoch, first, stop, steps, facts.promised(epoch, first, stop)))
            tally = tally.plus(made[-1])
        epoch, first = epoch + 1, 0
    return made if end.total is not None and tally.same(end) else None


def _parsed(data: bytes) -> tuple[list[_Line], str]:
    """The lines before the first invalid one, and what is wrong with it; one that a crash cut is ignored."""
    lines: list[_Line] = []
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), 1):
        try:
            lines.append(_next(lines[-1] if lines else None, text))
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return lines, f"line {number} is not a record ({str(error)[:80]})"
    return lines, ""


def _next(before: _Line | None, text: bytes) -> _Line:
    """Raises: what `_parsed` catches, for a line that cyxjax did not write."""
    value, end = json.loads(text), len(text) + (before.end if before else 0)
    if before is None or "seed" in value:
        facts = StreamFacts(**{name: int(value[name]) for name in StreamFacts._fields})  # type: ignore[arg-type]
        facts.plan()  # checks the sizes
        begins = Place(*map(int, value.get("begins", ())))
        return _Line(
            end, facts, None, before.tally if before else Tally(), value.get("taken_back", 0), begins
        )
    span = span_of_step(value) if "digest" in value else Span.from_json(value)
    return _Line(end, before.facts, span, before.tally.plus(span))


def _truncate(path: Path, length: int) -> None:
    if path.exists() and path.stat().st_size > length:
        os.truncate(path, length)
        sync(path)


class Kept(NamedTuple):
    """What a ledger file holds."""

    records: list[Record]
    taken_back: int  # recorded steps that were run again after a restart
    begins: Place = BEGINNING  # of the first step
    was: StreamFacts | None = None  # the order before the first step


def read_ledger(path: Path) -> Kept:
    """All records in the order they were written; an incomplete last line, as from a crash, is ignored.

    Raises: DataError for a line that cyxjax does not write.
    """
    refuse_link(path)
    lines, damage = _parsed(path.read_bytes())
    if damage:
        raise DataError(
            f"{path}: {damage}. HINT: resume the run: lost lines before its checkpoint are written again."
        )
    records = [Record(one.facts, one.span) for one in lines if one.span is not None]
    again = sum(one.taken_back for one in lines)
    return Kept(records, again, lines[0].begins, lines[0].facts) if lines else Kept(records, again)
