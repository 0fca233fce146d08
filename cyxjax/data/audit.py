"""Whether a run consumed the samples it promised, in order, through all its resumes; and if not, where.

What is expected depends only on the order of samples: a step goes on at the place where the one before it
ended, whatever batch size and number of processes each of them had.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cyxjax.data.ledger import Fingerprint, Ledger, StreamFacts, fingerprint
from cyxjax.data.ledger_file import Entry
from cyxjax.data.splitmix import mix

_SCAN = 1 << 20  # places looked at together when searching where samples belong: 8 MiB of sums


@dataclass(frozen=True)
class Finding:
    """One thing wrong at optimizer step `step`, counted from 0.

    `kind`: missing, skipped, repeated, reordered, altered, behind, or chain (the record was edited).
    """

    step: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.text}"


class Place(NamedTuple):
    """Where a run stands: so many samples of `epoch` were consumed."""

    epoch: int = 0
    samples: int = 0


class Step(NamedTuple):
    """A recorded step that counts: what stood before it, and its places: [first, stop) of its epoch."""

    before: Ledger
    entry: Entry
    was: StreamFacts  # the facts of the step before
    at: Place  # where the step before had ended
    first: int
    stop: int


def audit(entries: Iterable[Entry], *, max_findings: int = 10) -> list[Finding]:
    """What is wrong with a run, by step, at most `max_findings`; [] if every sample came in its place.

    Args:
        entries: the records in the order they were written. Steps that a resume made again count once, as
            made last.
    """
    findings: list[Finding] = []
    for step in walk(entries):
        findings += _check(step)
        if len(findings) >= max_findings:
            break
    return findings[:max_findings]


def surviving(entries: Iterable[Entry]) -> list[Entry]:
    """The records of the steps that count: one that goes back to step k takes the place of all from k on."""
    kept: list[Entry] = []
    for entry in entries:
        while kept and kept[-1].ledger.steps >= entry.ledger.steps:
            kept.pop()
        kept.append(entry)
    return kept


def walk(entries: Iterable[Entry]) -> Iterator[Step]:
    """The steps that count, each with its places."""
    before, at, was = Ledger(), Place(), None
    for entry in surviving(entries):
        facts, record = entry
        first, stop = _places(facts, record)
        yield Step(before, entry, was or facts, at, first, stop)
        at, before, was = Place(record.epoch, stop), record, facts


def _places(facts: StreamFacts, record: Ledger) -> tuple[int, int]:
    """[first, stop) of a record. One that does not say it is of a run whose steps were all of one length."""
    if record.first is not None:
        return record.first, record.first + record.last.num_samples
    plan = facts.plan()
    step = (record.steps - 1) % plan.num_steps
    return plan.start(step), plan.stop(step)


def ended(facts: StreamFacts, samples: int) -> bool:
    """Whether nothing is left of an epoch of which `samples` were consumed."""
    return facts.plan(samples).num_steps == 0


def _check(step: Step) -> Iterator[Finding]:
    number, record = step.entry.ledger.steps - 1, step.entry.ledger
    if record.steps != step.before.steps + 1:
        yield Finding(step.before.steps, "missing", f"no record of steps {step.before.steps} to {number - 1}")
        step = step._replace(at=Place(record.epoch, step.first), was=step.entry.facts)
    elif record.epoch < step.before.epoch or _continued(step) != record:
        yield Finding(
            number, "chain", "the record does not continue the one before it: one of them was changed"
        )
    yield from _check_place(number, step)
    facts = step.entry.facts
    plan = facts.plan(step.first)
    count = plan.total(0) if plan.num_steps else 0
    ids = facts.ids(record.epoch, step.first, step.first + count)
    expected = fingerprint(np.arange(step.first, step.first + count), ids)
    if record.last != expected:
        yield _explain(number, step, expected)


def _continued(step: Step) -> Ledger:
    record = step.entry.ledger
    return step.before.extend(record.epoch, record.last, record.first)


def _check_place(number: int, step: Step) -> Iterator[Finding]:
    """Whether the step began where the one before it ended."""
    facts, record, at = step.entry.facts, step.entry.ledger, step.at
    if record.epoch > at.epoch:
        # What is too little for a whole step may be dropped by the plan of either side of a resume.
        if not ended(step.was, at.samples) and not ended(facts, at.samples):
            last = step.was.num_samples - 1
            yield Finding(
                number, "skipped", f"places {at.samples} to {last} of epoch {at.epoch} were left out"
            )
        if record.epoch > at.epoch + 1:
            yield Finding(
                number, "skipped", f"is of epoch {record.epoch}: nothing is recorded of {at.epoch + 1}"
            )
        at = Place(record.epoch, 0)
    elif at.samples and not step.was.same_order(facts):
        yield Finding(number, "reordered", _of_two_orders(step.was, facts, at))
    if step.first > at.samples:
        left_out = f"places {at.samples} to {step.first - 1} of epoch {record.epoch} were left out"
        yield Finding(number, "skipped", left_out)
    elif step.first < at.samples:
        again = f"places {step.first} to {at.samples - 1} of epoch {record.epoch} were consumed before"
        yield Finding(number, "repeated", again)


def _of_two_orders(was: StreamFacts, now: StreamFacts, at: Place) -> str:
    used = was.ids(at.epoch, 0, min(at.samples, was.num_samples))
    rest = now.ids(at.epoch, min(at.samples, now.num_samples), now.num_samples)
    twice = int(np.isin(rest, used).sum())
    never = now.num_samples - int((np.union1d(used, rest) < now.num_samples).sum())
    return (
        f"the order was changed after {at.samples} samples of epoch {at.epoch} "
        f"({', '.join(was.changes(now))}): {twice} samples come twice in it, {never} never"
    )


def _explain(number: int, step: Step, expected: Fingerprint) -> Finding:
    facts, record = step.entry
    found, epoch, first = record.last, record.epoch, step.first
    promised = f"samples of places {first} to {first + expected.num_samples - 1} of epoch {epoch}"
    if (found.num_samples, found.unplaced) == (expected.num_samples, expected.unplaced):
        return Finding(number, "reordered", f"has the {promised}, but not in their order")
    start = find_places(found, epoch, facts)
    if start is None:
        return Finding(number, "altered", f"has {found.num_samples} samples that are not the {promised}")
    has = f"has the samples of places {start} to {start + found.num_samples - 1}"
    if start < first:
        return Finding(number, "repeated", f"{has}, which were consumed before; the plan says the {promised}")
    if start > first:
        return Finding(
            number, "skipped", f"{has}; places {first} to {start - 1} of epoch {epoch} were left out"
        )
    kind = "skipped" if found.num_samples < expected.num_samples else "repeated"
    return Finding(number, kind, f"{has} instead of the {promised}")


def find_places(found: Fingerprint, epoch: int, facts: StreamFacts) -> int | None:
    """The first place from which consecutive samples of `epoch` are the ones of `found`; None if nowhere."""
    count = found.num_samples
    if not 0 < count <= facts.num_samples:
        return None
    for start in range(0, facts.num_samples - count + 1, _SCAN):
        stop = min(start + _SCAN + count - 1, facts.num_samples)
        sums = np.zeros(stop - start + 1, np.uint64)
        np.cumsum(mix(facts.ids(epoch, start, stop)), out=sums[1:])
        hits = np.flatnonzero(sums[count:] - sums[:-count] == np.uint64(found.unplaced))
        if hits.size:
            return start + int(hits[0])
    return None
