"""Text as tokens: windows with the next tokens as targets, and texts packed into rows of one length."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cyxjax.data.sources import ArrayDataset
from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.errors import ConfigError
from cyxjax.files import read_plain, readable
from cyxjax.plugins import extra

IGNORED = -100  # the target of padding; CrossEntropyLoss(ignore_index=-100) leaves it out
_OPEN_ROWS = 64  # rows that may still receive a text: more would hardly fill better, but cost time


def load_text(
    root: Path | None = None,
    sequence_length: int = 64,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    tokenizer: str | None = None,
) -> Splits:
    """Characters of the file `root` (default: Python's help, 465 kB of English): int32 (sequence_length,).

    `tokenizer`: a tokenizer.json of the tokenizers library, whose tokens are used instead of characters.

    The text is split into three consecutive parts, so that training never sees validation and test text.
    """
    text = python_help() if root is None else _read(root)
    vocabulary = "" if tokenizer else "".join(sorted(set(text)))
    if tokenizer:
        tokens, width = _by_file(text, Path(tokenizer))
    else:
        tokens = np.searchsorted(_code_points(vocabulary), _code_points(text)).astype(np.int32)
        width = len(vocabulary)
    edges = np.rint(np.cumsum([1 - val_fraction - test_fraction, val_fraction]) * len(tokens)).astype(int)
    train, val, test = [next_token_windows(part, sequence_length) for part in np.split(tokens, edges)]
    info = DatasetInfo("text", "language", width, (sequence_length,), vocabulary)
    return Splits(train, val, test, info)


def _by_file(text: str, path: Path) -> tuple[npt.NDArray[np.int32], int]:
    """(tokens, size of the vocabulary). Raises: ConfigError without the library, DataError for the file."""
    library = extra("tokenizers", "cyxjax[tokenizers]")
    with readable(path, hint="name the tokenizer.json that transformers saved"):
        found = library.Tokenizer.from_file(str(path))
    found.no_truncation()  # the file may store both: a limit of a model's sequences, and their padding
    found.no_padding()
    return np.array(found.encode(text, add_special_tokens=False).ids, np.int32), found.get_vocab_size()


def python_help() -> str:
    """The help texts that come with Python, in the order of their titles."""
    topics = import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def decode(tokens: npt.NDArray[np.integer], vocabulary: str) -> str:
    """The text of `tokens`, each the index of a character in the sorted `vocabulary`."""
    return "".join(vocabulary[token] for token in np.asarray(tokens).reshape(-1).tolist())


def next_token_windows(tokens: np.ndarray, sequence_length: int) -> ArrayDataset:
    """Windows that do not overlap: inputs tokens[i : i+T], targets tokens[i+1 : i+T+1]; both (N, T).

    Raises: ConfigError if the text is shorter than one window.
    """
    num_windows = (len(tokens) - 1) // sequence_length if sequence_length > 0 else 0
    if num_windows <= 0:
        raise ConfigError(
            f"sequence_length={sequence_length} with a part of {len(tokens)} characters; expected 1 to "
            f"{len(tokens) - 1}. HINT: use a shorter sequence_length or a longer text.",
            key="options.sequence_length",
        )
    used, shape = num_windows * sequence_length, (num_windows, sequence_length)
    return ArrayDataset(tokens[:used].reshape(shape), tokens[1 : used + 1].reshape(shape))


def _read(path: Path) -> str:
    with readable(path, hint="give a UTF-8 text file"):
        return "\n".join(read_plain(path).decode("utf-8-sig").replace("\r\n", "\n").split("\r"))


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


class Packed(NamedTuple):
    """Rows (N, T), int32, with padding at their ends. As a dataset: three inputs and the targets."""

    tokens: npt.NDArray[np.int32]
    # 1, 2, ... for the texts of a row, 0 for padding: a token attends to those of its own segment
    segments: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]  # place in the text, from 0
    targets: npt.NDArray[np.int32]  # the next token of the same text; IGNORED for padding

    @property
    def filled(self) -> float:
        """The fraction of all places that is not padding."""
        return float((self.segments > 0).mean())


def pack(texts: Iterable[Sequence[int]], length: int, *, pad: int = 0) -> Packed:
    """Packs texts (sequences of token ids) into rows of `length` (token, next token) pairs, by first fit in
    their order, so that the same texts give the same rows. A longer text is cut into pieces.

    A text of one token has no next token and is left out.
    Raises: TypeError for anything but sequences of integers.
    """
    rows: list[list[npt.NDArray[np.int32]]] = []
    room: dict[int, int] = {}  # row -> free places, of those that are open
    for text in texts:
        for piece in _pieces(text, length):
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
    return _in_rows(rows, length, pad)


def _pieces(text: Sequence[int], length: int) -> list[npt.NDArray[np.int32]]:
    tokens = np.asarray(text)
    starts = range(0, len(tokens) - 1, length)  # a piece ends with the token with which the next one begins
    return [tokens[start : start + length + 1].astype(np.int32, casting="same_kind") for start in starts]


def _in_rows(rows: list[list[npt.NDArray[np.int32]]], length: int, pad: int) -> Packed:
    shape = (len(rows), length)
    packed = Packed(
        tokens=np.full(shape, pad, np.int32),
        segments=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        targets=np.full(shape, IGNORED, np.int32),
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
