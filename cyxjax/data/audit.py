"""Checks that a run consumed each sample once, through all its resumes.

What is expected depends only on the order of samples: a span goes on at the place where the one before it
ended, whatever batch size and number of processes each of them had.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cyxjax.data.ledger import Record, StreamFacts, Tally
from cyxjax.data.order import mix


@dataclass(frozen=True)
class Finding:
    """One thing wrong in the span that begins at optimizer step `step`, counted from 0.

    `kind`: skipped, repeated, reordered (the order changed within an epoch), altered or behind.
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


class Stretch(NamedTuple):
    """A recorded span, and what stood before it."""

    record: Record
    was: StreamFacts  # the facts of the span before
    at: Place  # where the span before had ended
    before: Tally

    @property
    def after(self) -> Tally:
        return self.before.plus(self.record.span)


def audit(records: Iterable[Record], *, max_findings: int = 10) -> list[Finding]:
    """What is wrong with a run, at most `max_findings`; [] if every sample came once, in its span."""
    findings: list[Finding] = []
    for stretch in walk(records):
        findings += [*check_place(stretch), *_check_samples(stretch)]
        if len(findings) >= max_findings:
            break
    return findings[:max_findings]


def walk(records: Iterable[Record]) -> Iterator[Stretch]:
    """The records, each with what stood before it."""
    at, before, was = Place(), Tally(), None
    for record in records:
        stretch = Stretch(record, was or record.facts, at, before)
        yield stretch
        at, before, was = Place(record.span.epoch, record.span.stop), stretch.after, record.facts


def check_place(stretch: Stretch) -> Iterator[Finding]:
    """Whether the span began where the one before it ended."""
    (facts, span), was, at, before = stretch
    number = before.steps
    if span.epoch > at.epoch:
        # What is too little for a whole step may be dropped by the plan of either side of a resume.
        if not was.ended(at.samples) and not facts.ended(at.samples):
            last = was.num_samples - 1
            yield Finding(
                number, "skipped", f"places {at.samples} to {last} of epoch {at.epoch} were left out"
            )
        if span.epoch > at.epoch + 1:
            yield Finding(
                number, "skipped", f"is of epoch {span.epoch}: nothing is recorded of {at.epoch + 1}"
            )
        at = Place(span.epoch, 0)
    elif span.epoch == at.epoch and at.samples and not was.same_order(facts):
        yield Finding(number, "reordered", _of_two_orders(was, facts, at))
    if span.epoch < at.epoch:
        text = f"is of epoch {span.epoch}, {at.samples} samples of epoch {at.epoch} were consumed before"
        yield Finding(number, "repeated", text)
    elif span.first > at.samples:
        left_out = f"places {at.samples} to {span.first - 1} of epoch {span.epoch} were left out"
        yield Finding(number, "skipped", left_out)
    elif span.first < at.samples:
        again = f"places {span.first} to {at.samples - 1} of epoch {span.epoch} were consumed before"
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


def _check_samples(stretch: Stretch) -> Iterator[Finding]:
    """Whether the samples of the span are those that stand at its places."""
    (facts, span), number = stretch.record, stretch.before.steps
    promised = facts.promised(span.epoch, span.first, span.stop)
    if span.found == promised:
        return
    kind = "skipped" if span.found.samples < promised.samples else "altered"
    kind = "repeated" if span.found.samples > promised.samples else kind
    yield Finding(
        number,
        kind,
        f"steps {number} to {number + span.steps - 1} have {span.found.samples} samples that are not the "
        f"{promised.samples} of places {span.first} to {span.stop - 1} of epoch {span.epoch}"
        f"{_single(stretch, promised.samples, promised.total)}",
    )


def _single(stretch: Stretch, samples: int, total: int) -> str:
    """Names the one sample that is missing, or that came twice, where it is one."""
    (facts, span), difference = stretch.record, (total - stretch.record.span.found.total) % 2**64
    if abs(span.found.samples - samples) != 1:
        return ""
    what = "sample {} is missing" if span.found.samples < samples else "sample {} came once more"
    wanted = difference if span.found.samples < samples else -difference % 2**64
    ids = facts.ids(span.epoch, span.first, min(span.stop, facts.num_samples))
    hits = np.flatnonzero(mix(ids) == np.uint64(wanted))
    return f": {what.format(int(ids[hits[0]]))}" if hits.size else ""
