"""The order of samples in an epoch: a shuffle in which each place is computed on its own.

A keyed Feistel network permutes [0, 2^bits); a value outside [0, num_samples) is permuted again until it
is inside (cycle walking). Nothing is stored, so the order of 10^10 samples needs as much memory as the
order of ten, and a resumed, resized or re-sharded run computes only the places that it needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cyxjax.errors import DataError

GOLDEN, MUL_1, MUL_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(values: npt.ArrayLike) -> np.ndarray:
    """uint64 in the shape of the integers `values`: a bijection; each bit depends on all input bits."""
    x = np.asarray(values).astype(np.uint64) + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MUL_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MUL_2)
    return x ^ (x >> np.uint64(31))


def mix64(value: int) -> int:
    """`mix` of one number, of which 64 bits are used."""
    return int(mix(np.array([value & (2**64 - 1)], np.uint64))[0])


Places = npt.NDArray[np.int64]

_ROUNDS = 10  # with 4, a chi-square test over 4000 epochs finds structure; 10 leaves a margin
_MIN_BITS = 6  # narrower networks reach too few permutations of a few samples
_TABLE_HALF_BITS = 7  # up to 16,384 places are in a table: the last values of a walk cost 100 numpy calls
_CHUNK = 1 << 15  # places permuted together, so that temporaries stay in the processor's cache


@dataclass(frozen=True)
class Order:
    """Sample index at every place of one epoch: `order[places]`, a bijection of [0, num_samples).

    A pure function of (num_samples, seed, epoch); the same on every rank, at any world size, on any
    machine. `shuffle=False` is the identity.
    """

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(f"num_samples={self.num_samples}: no data. HINT: check its source.")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, places: npt.ArrayLike | slice) -> Places:
        """Sample indices, int64, in the shape of `places`: integers in [0, num_samples), or a slice."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.num_samples), dtype=np.int64)
        where = np.asarray(places).astype(np.int64, casting="same_kind", copy=False)
        if not self.shuffle:
            return where.copy()
        if self._half_bits <= _TABLE_HALF_BITS:
            return np.asarray(self._table[where])
        flat = where.reshape(-1).astype(np.uint64)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            chunk[:] = self._walk(chunk)
        return flat.astype(np.int64).reshape(where.shape)

    def __iter__(self) -> Iterator[int]:
        """The whole order as Python integers, computed block by block."""
        for start in range(0, self.num_samples, _CHUNK):
            yield from self[start : start + _CHUNK].tolist()

    @cached_property
    def _half_bits(self) -> int:
        needed = (self.num_samples - 1).bit_length()
        return (max(needed, _MIN_BITS) + 1) // 2

    @cached_property
    def _round_keys(self) -> tuple[np.uint64, ...]:
        # int(): a numpy integer would overflow, a Python integer does not
        state = mix64(mix64(int(self.seed)) + int(self.epoch) * GOLDEN)
        states = [(state + i * GOLDEN) % 2**64 for i in range(1, _ROUNDS + 1)]
        return tuple(mix(np.array(states, np.uint64)))

    @cached_property
    def _table(self) -> Places:
        """The sample at each place, for a small dataset: all are computed together, between two epochs."""
        every = np.arange(1 << 2 * self._half_bits, dtype=np.uint64)
        moved = _feistel(every, self._half_bits, self._round_keys).astype(np.int64)
        # Each value outside is replaced by its own successor: walks of any length end in a few iterations.
        outside = np.flatnonzero(moved >= self.num_samples)
        while moved[: self.num_samples].max() >= self.num_samples:
            moved[outside] = moved[moved[outside]]
            outside = outside[moved[outside] >= self.num_samples]
        return moved[: self.num_samples]

    def _walk(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Applies the network until every value is a sample; at most 4 rounds on average for large sets."""
        limit = np.uint64(self.num_samples)
        values = _feistel(values, self._half_bits, self._round_keys)
        outside = np.flatnonzero(values >= limit)
        while outside.size:
            moved = _feistel(values[outside], self._half_bits, self._round_keys)
            values[outside] = moved
            outside = outside[moved >= limit]
        return values


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: tuple[np.uint64, ...]
) -> npt.NDArray[np.uint64]:
    """A permutation of [0, 4^half_bits): each round adds a keyed hash of one half to the other."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_hash(right, key) & mask)
    return (left << shift) | right


def _hash(half: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """A keyed hash whose low bits depend on all bits of `half` and of `key`."""
    z = half ^ key
    z *= np.uint64(MUL_1)
    z ^= z >> np.uint64(32)
    z *= np.uint64(MUL_2)
    z ^= z >> np.uint64(29)
    return z
