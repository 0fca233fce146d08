"""Whether a run consumed the samples it promised, in order, through all its resumes; and if not, where.

The global places of a step depend only on the size of the data set and the global batch, so resumes at
another number of processes leave what is expected unchanged.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cyxjax.data.ledger import Fingerprint, Ledger, fingerprint, mix
from cyxjax.errors import DataError

# (epoch, first place, one past the last place) -> the sample ids the sampler deals there, in order.
Order = Callable[[int, int, int], np.ndarray]
_SCAN = 1 << 20  # places looked at together when searching where samples belong: 8 MiB of sums


@dataclass(frozen=True)
class StreamPlan:
    """How an epoch's order is cut into steps."""

    num_samples: int
    global_batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.global_batch_size < 1 or self.steps_per_epoch < 1:
            raise DataError(
                f"{self} has no step. HINT: both sizes are at least 1; drop_last needs a whole batch."
            )

    @property
    def steps_per_epoch(self) -> int:
        whole = self.num_samples // self.global_batch_size
        return whole if self.drop_last else math.ceil(self.num_samples / self.global_batch_size)

    def places(self, step: int) -> tuple[int, int, int]:
        """(epoch, first place, one past the last place) of optimizer step `step`, counted from 0."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self.global_batch_size
        return epoch, first, min(first + self.global_batch_size, self.num_samples)


@dataclass(frozen=True)
class Finding:
    """One thing wrong at optimizer step `step`, counted from 0.

    `kind`: missing, skipped, repeated, reordered, altered, or chain (the record was edited).
    """

    step: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.text}"


def audit(
    records: Iterable[Ledger], order: Order, plan: StreamPlan, *, max_findings: int = 10
) -> list[Finding]:
    """What is wrong with a run, by step, at most `max_findings`; [] if every sample came in its place.

    Args:
        records: the ledger after each step, in the order they were written. Steps that a resume made again
            count once, as made last.
    """
    findings: list[Finding] = []
    before = Ledger()
    for record in surviving(records):
        findings += _check(before, record, order, plan)
        before = record
        if len(findings) >= max_findings:
            break
    return findings[:max_findings]


def surviving(records: Iterable[Ledger]) -> list[Ledger]:
    """The records of the steps that count: one that goes back to step k takes the place of all from k on."""
    kept: list[Ledger] = []
    for record in records:
        while kept and kept[-1].steps >= record.steps:
            kept.pop()
        kept.append(record)
    return kept


def _check(before: Ledger, record: Ledger, order: Order, plan: StreamPlan) -> Iterator[Finding]:
    step = record.steps - 1
    if record.steps != before.steps + 1:
        yield Finding(before.steps, "missing", f"no record of steps {before.steps} to {step - 1}")
    elif record.epoch < before.epoch or before.extend(record.epoch, record.last) != record:
        yield Finding(
            step, "chain", "the record does not continue the one before it: one of them was changed"
        )
    epoch, first, stop = plan.places(step)
    if record.epoch != epoch:
        yield Finding(step, "altered", f"is of epoch {record.epoch}, the plan says {epoch}")
    expected = fingerprint(np.arange(first, stop), order(epoch, first, stop))
    if record.last != expected:
        yield _explain(step, record.last, expected, order, plan)


def _explain(step: int, found: Fingerprint, expected: Fingerprint, order: Order, plan: StreamPlan) -> Finding:
    epoch, first, stop = plan.places(step)
    promised = f"samples of places {first} to {stop - 1} of epoch {epoch}"
    if (found.num_samples, found.unplaced) == (expected.num_samples, expected.unplaced):
        return Finding(step, "reordered", f"has the {promised}, but not in their order")
    start = find_places(found, epoch, order, plan)
    if start is None:
        return Finding(step, "altered", f"has {found.num_samples} samples that are not the {promised}")
    has = f"has the samples of places {start} to {start + found.num_samples - 1}"
    if start < first:
        return Finding(step, "repeated", f"{has}, which were consumed before; the plan says the {promised}")
    if start > first:
        return Finding(
            step, "skipped", f"{has}; places {first} to {start - 1} of epoch {epoch} were left out"
        )
    kind = "skipped" if found.num_samples < expected.num_samples else "repeated"
    return Finding(step, kind, f"{has} instead of the {promised}")


def find_places(found: Fingerprint, epoch: int, order: Order, plan: StreamPlan) -> int | None:
    """The first place from which consecutive samples of `epoch` are the ones of `found`; None if nowhere."""
    count = found.num_samples
    if not 0 < count <= plan.num_samples:
        return None
    for start in range(0, plan.num_samples - count + 1, _SCAN):
        stop = min(start + _SCAN + count - 1, plan.num_samples)
        sums = np.zeros(stop - start + 1, np.uint64)
        np.cumsum(mix(order(epoch, start, stop)), out=sums[1:])
        hits = np.flatnonzero(sums[count:] - sums[:-count] == np.uint64(found.unplaced))
        if hits.size:
            return start + int(hits[0])
    return None
