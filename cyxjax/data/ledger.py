"""Which samples a run has consumed, as a rolling hash that does not depend on the number of processes.

Every step is summed up by two numbers that add up over ranks (Fingerprint) and chained to the steps before
it (Ledger). `cyxjax.data.audit` compares a run's ledgers with the order the sampler promised.

This catches what bugs and resumes do (a sample skipped, repeated, dealt to another place). It is no
signature: whoever may write the run folder can compute a new chain.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 of the same shape: a bijection whose every output bit depends on every input bit.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014, OOPSLA).
    """
    x = np.asarray(values).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Ledger:
    """All samples consumed up to a step: counts, the last step's fingerprint, and the digest of the chain."""

    steps: int = 0
    samples: int = 0
    epoch: int = 0
    last: Fingerprint = Fingerprint()
    digest: str = _CHAIN_START

    def extend(self, epoch: int, batch: Fingerprint) -> "Ledger":
        """The ledger after one more step, which consumed `batch` (all ranks' shares added up) in `epoch`.

        Raises: DataError if epochs go backwards.
        """
        if epoch < self.epoch:
            raise DataError(
                f"Step of epoch {epoch} after one of epoch {self.epoch}. HINT: resume in its epoch."
            )
        steps, samples = self.steps + 1, self.samples + batch.num_samples
        text = f"{self.digest} {epoch} {steps} {samples} {batch.num_samples} {batch.placed} {batch.unplaced}"
        return Ledger(steps, samples, epoch, Fingerprint(*batch), hashlib.sha256(text.encode()).hexdigest())

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's meta and, one a step, the run's record. Sums are hexadecimal (> 2**53)."""
        last = [self.last.num_samples, f"{self.last.placed:016x}", f"{self.last.unplaced:016x}"]
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"last": last}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Ledger":
        """Raises: DataError for anything but what to_json gives."""
        try:
            count, placed, unplaced = raw["last"]
            last = Fingerprint(_natural(count), _word(placed), _word(unplaced))
            steps, samples, epoch = (_natural(raw[name]) for name in ("steps", "samples", "epoch"))
            if len(bytes.fromhex(raw["digest"])) != 32 or set(raw) != {f.name for f in fields(cls)}:
                raise ValueError(f"fields are {sorted(raw)}")
            return cls(steps, samples, epoch, last, raw["digest"])
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


def read_records(path: Path) -> tuple[StreamFacts, list[Ledger]]:
    """(the newest facts, all ledgers in the order they were written) of a ledger file.

    A last line that a crash cut short is left out.
    Raises: DataError for anything that `LedgerHook` does not write, and for runs of other data in one file.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    raw = [_parsed(path, i, line) for i, line in enumerate(lines, 1) if line.endswith("\n")]
    facts = {tuple(sorted(line.items())) for line in raw if "seed" in line}
    if len(facts) != 1:
        raise DataError(
            f"{path} tells of {len(facts)} different orders of samples; expected one. "
            "HINT: data, seed or global batch were changed between starts; keep them, or use another folder."
        )
    try:
        return StreamFacts(**dict(facts.pop())), [
            Ledger.from_json(line) for line in raw if "seed" not in line
        ]
    except TypeError as error:
        raise DataError(f"{path}: {error}. HINT: it was not written by cyxjax.") from error


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: {error}. HINT: it was not written by cyxjax.") from error
    if not isinstance(value, dict) or (
        "seed" in value and not all(isinstance(v, int) for v in value.values())
    ):
        raise DataError(f"{path}:{number} is no record. HINT: it was not written by cyxjax.")
    return value
