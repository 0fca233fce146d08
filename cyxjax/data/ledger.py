"""Which samples a run has consumed, as a rolling hash that does not depend on the number of processes.

Every step is summed up by two numbers that add up over ranks (Fingerprint) and chained to the steps before
it (Ledger). `cyxjax.data.audit` compares a run's ledgers with the order the sampler promised.

This catches what bugs and resumes do (a sample skipped, repeated, dealt to another place). It is no
signature: whoever may write the run folder can compute a new chain.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from cyxjax.data.batches import BatchPlan
from cyxjax.data.order import Order
from cyxjax.data.splitmix import mix
from cyxjax.errors import DataError

_WORD = 2**64
_CHAIN_START = hashlib.sha256(b"cyxjax ledger 1").hexdigest()


class Fingerprint(NamedTuple):
    """Samples of one step, or one rank's share of them: `a + b` is the fingerprint of both shares together.

    `placed` sums a 64-bit mix of (place, id) over the samples, `unplaced` a mix of id alone, both modulo
    2**64: equal `unplaced` with another `placed` means the same samples in another order.
    """

    num_samples: int = 0
    placed: int = 0
    unplaced: int = 0

    def __add__(self, other: tuple) -> "Fingerprint":
        num_samples, placed, unplaced = other
        return Fingerprint(
            self.num_samples + num_samples, (self.placed + placed) % _WORD, (self.unplaced + unplaced) % _WORD
        )


def fingerprint(places: np.ndarray, ids: np.ndarray) -> Fingerprint:
    """The fingerprint of samples `ids` consumed at `places` of the epoch's global order.

    Both int64, same shape, any shape, any order: what counts is which id stood at which place. Leave
    padding out: it is not consumed.
    Raises: DataError if the shapes differ.
    """
    places, ids = np.asarray(places), np.asarray(ids)
    if places.shape != ids.shape:
        raise DataError(
            f"places {places.shape} and ids {ids.shape} differ in shape. HINT: one place for each id."
        )
    flat = places.reshape(1, -1), ids.reshape(1, -1)
    return fingerprints(*flat, np.ones((1, ids.size), bool))[0]


def fingerprints(places: np.ndarray, ids: np.ndarray, real: np.ndarray) -> list[Fingerprint]:
    """One fingerprint for each row of `places` and `ids` (steps, rows), of its samples that are `real`."""
    mixed_ids = mix(ids)
    placed = np.where(real, mix(mixed_ids ^ mix(places + 1)), 0).sum(axis=1, dtype=np.uint64)
    unplaced = np.where(real, mixed_ids, 0).sum(axis=1, dtype=np.uint64)
    columns = (real.sum(axis=1).tolist(), placed.tolist(), unplaced.tolist())
    return [Fingerprint(*row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Ledger:
    """All samples consumed up to a step: counts, the last step's fingerprint, and the digest of the chain.

    The last step took the places from `first` on of the order of `epoch`; None in records of before cyxjax
    counted places, when every step of an epoch was as long as the first.
    """

    steps: int = 0
    samples: int = 0
    epoch: int = 0
    last: Fingerprint = Fingerprint()
    digest: str = _CHAIN_START
    first: int | None = None

    def extend(self, epoch: int, batch: Fingerprint, first: int | None = None) -> "Ledger":
        """The ledger after one more step, which consumed `batch` (all ranks' shares added up) in `epoch`,
        from place `first` on.

        Raises: DataError if epochs go backwards.
        """
        if epoch < self.epoch:
            raise DataError(
                f"Step of epoch {epoch} after one of epoch {self.epoch}. HINT: resume in its epoch."
            )
        steps, samples = self.steps + 1, self.samples + batch.num_samples
        told = [epoch, steps, samples, *batch] if first is None else [epoch, steps, samples, *batch, first]
        digest = hashlib.sha256(" ".join(map(str, [self.digest, *told])).encode()).hexdigest()
        return Ledger(steps, samples, epoch, Fingerprint(*batch), digest, first)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's meta and, one a step, the run's record. Sums are hexadecimal (> 2**53)."""
        last = [self.last.num_samples, f"{self.last.placed:016x}", f"{self.last.unplaced:016x}"]
        known = {name: value for name, value in vars(self).items() if value is not None}
        return known | {"last": last}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Ledger":
        """Raises: DataError for anything but what to_json gives."""
        try:
            count, placed, unplaced = raw["last"]
            last = Fingerprint(_natural(count), _word(placed), _word(unplaced))
            steps, samples, epoch = (_natural(raw[name]) for name in ("steps", "samples", "epoch"))
            if len(bytes.fromhex(raw["digest"])) != 32 or set(raw) | {"first"} != {
                f.name for f in fields(cls)
            }:
                raise ValueError(f"fields are {sorted(raw)}")
            first = _natural(raw["first"]) if "first" in raw else None
            return cls(steps, samples, epoch, last, raw["digest"], first)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"Not a ledger: {str(error)[:200]}. HINT: it was not written by cyxjax."
            ) from error


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:60]!r} is not a whole number")
    return value


def _word(text: str) -> int:
    if len(text) != 16:
        raise ValueError(f"{text[:60]!r} is not 16 hexadecimal digits")
    return int(text, 16)


class StreamFacts(NamedTuple):
    """What makes the order of samples, and how it is cut into steps."""

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

    def changes(self, now: "StreamFacts") -> list[str]:
        """What differs in `now`, a clause each; [] if nothing does."""
        pairs = zip(self._fields, self, now, strict=True)
        return [f"{name} is {new}, was {old}" for name, old, new in pairs if old != new]

    def same_order(self, other: "StreamFacts") -> bool:
        """Whether both deal the same sample at every place, however they are cut into steps."""
        return (self.num_samples, self.seed, self.shuffle) == (other.num_samples, other.seed, other.shuffle)


def expected_step(facts: StreamFacts, before: Ledger, epoch: int, first: int, placed: bool = True) -> Ledger:
    """The ledger after the step that `facts` promise at place `first` of `epoch`; its stop is
    `facts.plan(first).stop(0)`. `placed`: whether its record says where it began.
    """
    stop = facts.plan(first).stop(0)
    batch = fingerprint(np.arange(first, stop), facts.ids(epoch, first, stop))
    return before.extend(epoch, batch, first if placed else None)
