"""Readers of file formats: bytes in, numpy arrays out. Every error names the file and the field.

Nothing is unpickled: a data file can hold wrong numbers, but no code to run.
"""

import csv
import gzip
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cyxjax.errors import DataError, nearest
from cyxjax.files import open_plain, read_plain, readable

# IDX: two zero bytes, a type code, the number of dimensions, each as big-endian uint32, then the values.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CIFAR_SIDE, _CIFAR_CHANNELS = 32, 3
_CIFAR_RECORD = 1 + _CIFAR_CHANNELS * _CIFAR_SIDE**2  # the label, then the red, green and blue planes
_CORRECT = "correct that row, or leave it out"


def read_bytes(path: Path) -> bytes:
    """The bytes of the file, unzipped if it begins with gzip's magic bytes, regardless of its name."""
    with readable(path):
        raw = read_plain(path)
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """The array in an IDX file (MNIST's format), in native byte order. Raises: DataError."""
    raw = read_bytes(path)
    code, dimensions = raw[2:4].ljust(2, b"\0")
    if raw[:2] != b"\0\0" or code not in _IDX_TYPES or dimensions != ndim:
        raise DataError(
            f"{path}: header {raw[:4].hex()}, type 0x{code:02x}, {dimensions} dimensions; expected 0000, a "
            f"type from 0x08 to 0x0e and {ndim}. HINT: images have 3 dimensions, labels 1; check the names."
        )
    with readable(path):
        dtype = np.dtype(_IDX_TYPES[code])
        shape = np.frombuffer(raw, ">u4", ndim, offset=4).tolist()
        values = np.frombuffer(raw, dtype, offset=4 + 4 * ndim).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def read_cifar10(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Images (N, 32, 32, 3) and labels (N,) of one file of CIFAR-10's binary version. Raises: DataError."""
    with readable(path, hint="take the binary version of CIFAR-10, unpacked"):
        records = np.frombuffer(read_bytes(path), np.uint8).reshape(-1, _CIFAR_RECORD)
    planes = records[:, 1:].reshape(-1, _CIFAR_CHANNELS, _CIFAR_SIDE, _CIFAR_SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int32)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays in an .npz file by name. Raises: DataError, also for pickled content."""
    hint = "write it with np.savez, numbers and no Python objects"
    # opened here: numpy leaves its own handle open if the file is not an archive
    with (
        readable(path, hint=hint),
        open_plain(path, "rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}


def read_npy(path: Path) -> np.ndarray:
    """A memory map of an .npy file: rows are read from disk when they are accessed."""
    with readable(path, hint="write it with np.save"):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def in_mode(image: Any, mode: str) -> Any:
    """A Pillow image in `mode`, "L" or "RGB". Raises: ValueError for one of more than 8 bits per channel."""
    if image.mode[0] in "IF":
        raise ValueError(f"mode {image.mode} of more than 8 bits, which Pillow would clip: convert it to 8")
    return image.convert(mode)


def read_csv(
    path: Path, target: str | None = None, task: str | None = None
) -> tuple[npt.NDArray[np.float32], np.ndarray, list[str], list[str]]:
    """Features float32 (N, F), targets (N,), names of classes and of features, of a CSV file with a header.

    The target is the column `target`, or the last. Words become int32 class numbers (sorted; the third result
    has their names), whole numbers from 0 on stay integers, others become float32. A given `task` decides:
    in a classification other numbers are words, in a regression all are float32.

    Raises: DataError for a file without samples or the column, for a row without a target, and for a value
    that is not a number.
    """
    rows = _csv_rows(path)
    _, header = next(rows)
    name = header[-1] if target is None else target
    if name not in header or len(header) < 2:
        hint = "give a header and two columns or more." if name in header else nearest(name, header)
        raise DataError(f"{path}: {len(header)} columns; expected {name!r} and others. HINT: {hint}")
    column = len(header) - 1 if target is None else header.index(name)
    features, values = _numbers(path, rows, column)
    with readable(path, hint=_CORRECT):
        targets, classes = _csv_targets(values, task)
    return features, targets, classes, header[:column] + header[column + 1 :]


def read_table(path: Path, names: Sequence[str] = ()) -> npt.NDArray[np.float32]:
    """All columns, float32 (N, F), of a CSV file. A first row of numbers is a sample, unless it numbers the
    columns, as pandas does, or holds their known `names`; any other first row is a header.

    A header with these names, in any order, assigns the columns; one that numbers them is ignored.
    Raises: DataError for a header with different names, for no samples, and for a value that is not a number.
    """
    rows = _csv_rows(path)
    top = next(rows)
    first = top[1]
    wanted = [name.strip() for name in names]
    is_named = len(set(wanted)) == len(wanted) and sorted(wanted) == sorted(first)
    if not is_named and _are_numbers(first):
        counts = (list(map(str, range(start, start + len(first)))) for start in (0, 1))
        rows = rows if len(first) > 1 and first in counts else chain([top], rows)
    elif not is_named and len(set(wanted)) == len(wanted) > 0:
        raise DataError(
            f"{path}: columns {', '.join(first)}; the run was trained on {', '.join(wanted)}. "
            "HINT: give these columns, in any order."
        )
    table, _ = _numbers(path, rows)
    return table[:, [first.index(name) for name in wanted]] if is_named else table


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number from 1, cells) of each row that is not empty; one empty cell for a file without rows.

    Raises: DataError for a row whose length differs from the first, and for an empty cell below it.
    """
    top: list[str] = []
    with (
        readable(path, hint="save it as UTF-8 text"),
        open_plain(path, "r", newline="", encoding="utf-8-sig") as file,
    ):
        for number, row in enumerate(filter(None, csv.reader(file)), 1):
            cells = [cell.strip() for cell in row]
            top = top or cells
            if len(cells) != len(top):
                raise DataError(
                    f"{path}, row {number}: {len(cells)} values; row 1 has {len(top)}. HINT: give "
                    "each column a name in row 1, and each row a value for it."
                )
            if number > 1 and "" in cells:  # as a target, a class of its own, which changes other numbers
                raise DataError(
                    f"{path}, row {number}: no value in the column that begins with "
                    f"{top[cells.index('')]!r}. HINT: {_CORRECT}."
                )
            yield number, cells
    if not top:
        yield 1, [""]


def _numbers(
    path: Path, rows: Iterable[tuple[int, list[str]]], target: int | None = None
) -> tuple[npt.NDArray[np.float32], list[str]]:
    """(values of all columns but `target`, float32 (N, F); texts of that column).

    Row by row, because a table of texts takes many times the memory of its numbers.
    Raises: DataError for no rows, and naming the row of a value that is not a number.
    """
    values, texts, width = array("f"), [], 0
    for number, row in rows:
        if target is not None:
            texts.append(row.pop(target))
        width = len(row)
        with readable(f"{path}, row {number}", hint=_CORRECT):
            values.extend(map(float, row))
    if not values:
        raise DataError(f"{path}: no samples. HINT: give data rows.")
    return np.array(values, np.float32).reshape(-1, width), texts


def _are_numbers(row: list[str]) -> bool:
    try:
        np.array(row, np.float64)
    except ValueError:
        return False
    return True


def _csv_targets(values: list[str], task: str | None) -> tuple[np.ndarray, list[str]]:
    if task == "regression":
        return np.array(values, np.float64).astype(np.float32), []
    if _are_numbers(values):
        numbers = np.array(values, np.float64)
        if task == "classification" and not np.isfinite(numbers).all():
            raise ValueError(f"label {values[int(np.argmin(np.isfinite(numbers)))]!r} is not a class")
        if np.all(numbers == np.rint(numbers)) and numbers.min() >= 0:
            return numbers.astype(np.int64), []
        if task is None:
            return numbers.astype(np.float32), []
    names, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int32), names.tolist()
