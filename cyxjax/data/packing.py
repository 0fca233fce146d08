"""Packs texts of different lengths into rows of one length."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cyxjax.errors import ConfigError, DataError

IGNORED = -100  # the target of padding; CrossEntropyLoss(ignore_index=-100) leaves it out
_OPEN_ROWS = 64  # rows that a text may still go into: more would fill hardly better, and cost time


class Packed(NamedTuple):
    """Rows (N, T), int32, padding at their ends."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]  # the next token of the same text; IGNORED for padding
    segments: npt.NDArray[
        np.int32
    ]  # 1, 2, ... for the texts of a row, 0 for padding: attend where they agree
    positions: npt.NDArray[np.int32]  # place in the text, from 0

    @property
    def filled(self) -> float:
        """The part of all places that is no padding."""
        return float((self.segments > 0).mean())


def pack(texts: Iterable[Sequence[int]], length: int, *, pad: int = 0) -> Packed:
    """Texts (token numbers) cut into pieces of at most `length` pairs of a token and the next one, and put
    into rows of `length`; first fit, in their order, so the same texts give the same rows.

    A text of one token has no next one and is left out.
    Raises: ConfigError for a length below 1; DataError for what is no sequence of whole numbers, and no text.
    """
    if length < 1:
        raise ConfigError(f"length={length}: expected 1 or more. HINT: the model's sequence_length.")
    rows: list[list[npt.NDArray[np.int32]]] = []
    room: dict[int, int] = {}  # row -> free places, of those that are open
    for number, text in enumerate(texts):
        for piece in _pieces(number, text, length):
            need = len(piece) - 1
            row = next((r for r, free in room.items() if free >= need), None)
            if row is None:
                row = len(rows)
                rows.append([])
                room[row] = length
            rows[row].append(piece)
            room[row] -= need
            if not room[row] or len(room) > _OPEN_ROWS:
                del room[row if not room[row] else next(iter(room))]
    if not rows:
        raise DataError("no text of two tokens or more. HINT: check the tokenizer.")
    return _filled(rows, length, pad)


def _pieces(number: int, text: Sequence[int], length: int) -> list[npt.NDArray[np.int32]]:
    tokens = np.asarray(text)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(
            f"text {number} is {tokens.dtype}{list(tokens.shape)}; expected token numbers. HINT: tokenize it."
        )
    starts = range(0, len(tokens) - 1, length)  # a piece ends with the token that the next one begins with
    return [tokens[start : start + length + 1].astype(np.int32) for start in starts]


def _filled(rows: list[list[npt.NDArray[np.int32]]], length: int, pad: int) -> Packed:
    shape = (len(rows), length)
    packed = Packed(
        np.full(shape, pad, np.int32),
        np.full(shape, IGNORED, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
    )
    for row, pieces in enumerate(rows):
        at = 0
        for number, piece in enumerate(pieces, 1):
            here = slice(at, at + len(piece) - 1)
            packed.tokens[row, here], packed.targets[row, here] = piece[:-1], piece[1:]
            packed.segments[row, here] = number
            packed.positions[row, here] = np.arange(len(piece) - 1)
            at = here.stop
    return packed
