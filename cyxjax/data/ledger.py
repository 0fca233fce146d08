"""The record of consumed samples, one entry per span of steps, and the audit of it.

A span names the places of an epoch's order that its steps cover, and holds a sum over the ids of the samples
that were actually delivered, in any order, so that sums of ranks and spans can be added. The audit computes
the sums that the order implies and checks that spans tile each epoch, for any batch size and number of
processes.

This finds the errors of bugs and resumes (a sample lost, repeated or replaced). It is not a signature: anyone
who can write to the run folder can compute different sums.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cyxjax.data.batches import BatchPlan
from cyxjax.data.order import Order, mix

_WORD = 2**64
_AT_ONCE = 1 << 20  # ids that are summed together


class Delivered(NamedTuple):
    """A number of samples, and `total`: the sum of a 64-bit mix of each id modulo 2**64, in any order."""

    samples: int = 0
    total: int = 0

    def plus(self, other: "Delivered") -> "Delivered":
        return Delivered(self.samples + other.samples, (self.total + other.total) % _WORD)


def delivered(ids: np.ndarray, real: np.ndarray) -> list[Delivered]:
    """The samples in each row of `ids` (steps, rows); padding, which is not `real`, does not count."""
    totals = np.where(real, mix(ids), 0).sum(axis=1, dtype=np.uint64)
    return [Delivered(*row) for row in zip(real.sum(axis=1).tolist(), totals.tolist(), strict=True)]


class Span(NamedTuple):
    """Consecutive steps of one epoch: the places [first, stop) of its order, and the delivered samples."""

    epoch: int
    first: int
    stop: int
    steps: int
    found: Delivered

    def to_json(self) -> dict[str, Any]:
        """A line of the record. The sum is hexadecimal because it may exceed 2**53."""
        numbers = dict(zip(self._fields, self[:-1], strict=False))
        return {**numbers, "samples": self.found.samples, "sum": f"{self.found.total:016x}"}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Span":
        """The inverse of to_json. Raises: ValueError, KeyError or TypeError for anything else."""
        epoch, first, stop, steps, samples = (
            _natural(raw[name]) for name in ("epoch", "first", "stop", "steps", "samples")
        )
        if first >= stop or not steps or len(raw) != 6:
            raise ValueError(f"{raw} is empty, or has other fields")
        return cls(epoch, first, stop, steps, Delivered(samples, int(raw["sum"], 16)))


class Tally(NamedTuple):
    """Everything consumed up to a save. total: None after a checkpoint of 0.2.0, which has no such sum."""

    steps: int = 0
    samples: int = 0
    total: int | None = 0

    def plus(self, span: Span) -> "Tally":
        total = None if self.total is None else (self.total + span.found.total) % _WORD
        return Tally(self.steps + span.steps, self.samples + span.found.samples, total)

    def same(self, other: "Tally") -> bool:
        """Whether both count the same samples; totals are compared if both are known."""
        known = self.total is not None and other.total is not None
        return self[:2] == other[:2] and (not known or self.total == other.total)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's meta."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "sum": None if self.total is None else f"{self.total:016x}",
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Tally":
        """From the meta of a verified checkpoint of this version or of 0.2.0."""
        total = None if "digest" in raw or raw["sum"] is None else int(raw["sum"], 16)
        return cls(raw["steps"], raw["samples"], total)


class StreamFacts(NamedTuple):
    """What determines the order of samples and how it is divided into steps."""

    num_samples: int
    global_batch_size: int
    drop_last: bool
    seed: int
    shuffle: bool

    def plan(self, first: int = 0) -> BatchPlan:
        """The steps of an epoch from place `first` on. Raises: DataError if there is none."""
        return BatchPlan(self.num_samples, self.global_batch_size, drop_last=self.drop_last, first=first)

    def ids(self, epoch: int, first: int, stop: int) -> np.ndarray:
        """The samples at the places [first, stop) of `epoch`, in order."""
        return Order(self.num_samples, self.seed, epoch, self.shuffle)[first:stop]

    def promised(self, epoch: int, first: int, stop: int) -> Delivered:
        """The samples that the steps of these places should deliver."""
        found = Delivered()
        for start in range(first, min(stop, self.num_samples), _AT_ONCE):
            ids = self.ids(epoch, start, min(start + _AT_ONCE, stop))[None]
            found = found.plus(delivered(ids, np.ones(ids.shape, bool))[0])
        return found

    def ended(self, samples: int) -> bool:
        """Whether nothing is left of an epoch of which `samples` were consumed."""
        return self.plan(samples).num_steps == 0

    def changes(self, now: "StreamFacts") -> list[str]:
        """The differences in `now`, one clause each."""
        pairs = zip(self._fields, self, now, strict=True)
        return [f"{name} is {new}, was {old}" for name, old, new in pairs if old != new]

    def same_order(self, other: "StreamFacts") -> bool:
        """Whether both have the same sample at every place, regardless of the division into steps."""
        return (self.num_samples, self.seed, self.shuffle) == (other.num_samples, other.seed, other.shuffle)


class Record(NamedTuple):
    """One recorded span, and the order it was read in."""

    facts: StreamFacts
    span: Span


def span_of_step(raw: Mapping[str, Any]) -> Span:
    """A record of 0.2.0, which covers one step, as a span.

    The digest of all steps before it is not read: sums are compared with the order.
    Raises: ValueError, KeyError or TypeError for anything else.
    """
    samples, _, total = raw["last"]
    count, first = _natural(samples), _natural(raw["first"])
    return Span(_natural(raw["epoch"]), first, first + count, 1, Delivered(count, int(total, 16)))


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:60]!r} is not a whole number")
    return value


@dataclass(frozen=True)
class Finding:
    """A problem in the span that begins at optimizer step `step` of the record, counted from 1 and
    including steps that a rollback undid.

    `kind`: skipped, repeated, reordered (the order changed within an epoch), altered or behind.
    """

    step: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.text}"


class Place(NamedTuple):
    """The position of a run: the number of `samples` of `epoch` that were consumed."""

    epoch: int = 0
    samples: int = 0


BEGINNING = Place()


class Stretch(NamedTuple):
    """A recorded span, and the state before it."""

    record: Record
    was: StreamFacts  # the facts of the span before
    at: Place  # where the span before ended
    before: Tally

    @property
    def after(self) -> Tally:
        return self.before.plus(self.record.span)


def audit(
    records: Iterable[Record],
    begins: Place = BEGINNING,
    was: StreamFacts | None = None,
    *,
    max_findings: int = 10,
) -> list[Finding]:
    """The problems of a run, at most `max_findings`; [] if each sample was used once, in its span.

    begins, was: see `walk`.
    """
    findings: list[Finding] = []
    for stretch in walk(records, begins, was):
        findings += [*_check_place(stretch), *_check_samples(stretch)]
        if len(findings) >= max_findings:
            break
    return findings[:max_findings]


def walk(
    records: Iterable[Record], begins: Place = BEGINNING, was: StreamFacts | None = None
) -> Iterator[Stretch]:
    """The records, each with the state before it.

    begins: where the first one should begin. was: the order before it; None: its own.
    """
    at, before = begins, Tally()
    for record in records:
        stretch = Stretch(record, was or record.facts, at, before)
        yield stretch
        at, before, was = Place(record.span.epoch, record.span.stop), stretch.after, record.facts


def _check_place(stretch: Stretch) -> Iterator[Finding]:
    """Whether the span began where the one before it ended."""
    (facts, span), was, at, number = *stretch[:3], stretch.before.steps + 1
    # A rest that is too small for a whole step may be dropped by the plan before or after a resume.
    was_over = span.epoch > at.epoch and was.ended(at.samples)
    is_over = span.epoch > at.epoch and facts.ended(at.samples)
    within = span.epoch == at.epoch or (is_over and not was_over)
    if within and at.samples and not was.same_order(facts):
        text = f"the order was changed after {at.samples} samples of epoch {at.epoch + 1}"
        yield Finding(
            number,
            "reordered",
            f"{text}: some samples occur twice in it, some never ({', '.join(was.changes(facts))})",
        )
    if was_over or is_over:
        at = Place(at.epoch + 1)
    begins = Place(span.epoch, span.first)
    if begins != at:
        kind, what = ("repeated", "used again") if begins < at else ("skipped", "left out")
        (epoch, first), (last_epoch, last) = sorted((begins, at))
        text = f"from place {first} of epoch {epoch + 1} to before place {last} of epoch {last_epoch + 1}"
        yield Finding(number, kind, f"{what}: {text}")


def _check_samples(stretch: Stretch) -> Iterator[Finding]:
    """Whether the samples of the span are those at its places."""
    (facts, span), number = stretch.record, stretch.before.steps + 1
    promised = facts.promised(span.epoch, span.first, span.stop)
    if span.found == promised:
        return
    kind = "skipped" if span.found.samples < promised.samples else "altered"
    kind = "repeated" if span.found.samples > promised.samples else kind
    yield Finding(
        number,
        kind,
        f"steps {number} to {number + span.steps - 1} have {span.found.samples} samples that are not the "
        f"{promised.samples} of places {span.first} to {span.stop - 1} of epoch {span.epoch + 1}",
    )
