"""Leaves that several processes wrote: each its own elements, in a file of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from pydantic import Field

Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A whole number of a manifest."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of a leaf in C order, in the file of `process`; the crc32 of their bytes."""

    process: Natural
    start: Natural
    stop: Natural
    crc32: Natural


class Share(Protocol):
    """What one process holds of a leaf: its elements `start` to `stop` in C order. `shape` is the leaf's."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def is_whole(self) -> bool:
        """Whether this process holds all of the leaf; equal on all processes."""

    def values(self) -> np.ndarray:
        """The elements, flat, as a fresh host array."""


def is_share(leaf: Any) -> TypeGuard[Share]:
    """Whether `leaf` is a `Share`, by the one name that no array has."""
    # Not isinstance: of a protocol it takes 20 us, and each leaf is asked about five times a save.
    return hasattr(leaf, "is_whole")


@dataclass(frozen=True, eq=False)
class HostShare:
    """A `Share` whose elements were copied to the host."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    stop: int
    elements: np.ndarray
    is_whole: bool = False

    @classmethod
    def of(cls, share: Share) -> "HostShare":
        return cls(tuple(share.shape), np.dtype(share.dtype), share.start, share.stop, share.values())

    def values(self) -> np.ndarray:
        return self.elements


def host_value(leaf: Any) -> np.ndarray:
    """A whole leaf on the host, on CPU a view, which the next step may change; of a `Share` its elements."""
    if is_share(leaf):
        return leaf.values()
    if not hasattr(leaf, "is_fully_replicated"):
        return np.asarray(leaf)
    return np.asarray(leaf.addressable_data(0) if leaf.is_fully_replicated else leaf)


def file_of(process: int) -> str:
    """The file of a step's arrays that `process` writes."""
    return f"process_{process:05d}.safetensors"


def find_gap(pieces: Sequence[Piece], size: int) -> str:
    """Where `pieces`, in their order, do not make up `size` elements; "" if each is there once."""
    at = 0
    for piece in pieces:
        if piece.start != at or piece.stop <= at:
            return f"a piece of elements {piece.start} to {piece.stop} follows element {at}"
        at = piece.stop
    return "" if at == size else f"its pieces end at element {at} of {size}"


def joined_crc32(pieces: Iterable[Piece], itemsize: int) -> int:
    """crc32 of all pieces' bytes, one after the other, from the crc32 of each.

    Source: zlib's crc32_combine: what is put before n bytes is multiplied by x^(8n) modulo the polynomial.
    """
    crc = 0
    for piece in pieces:
        crc = _times(_power_of_x(8 * (piece.stop - piece.start) * itemsize), crc) ^ piece.crc32
    return crc


_POLYNOMIAL, _ONE, _X = 0xEDB88320, 1 << 31, 1 << 30  # bits reversed, as in all of crc32


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(n: int) -> int:
    power, square = _ONE, _X
    while n:
        power = _times(square, power) if n & 1 else power
        n, square = n >> 1, _times(square, square)
    return power
