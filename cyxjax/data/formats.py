"""Readers of file formats: bytes in, numpy arrays out. Every error names the file and the field.

Nothing is unpickled: a data file can hold wrong numbers, never a program.
"""

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cyxjax.errors import DataError, nearest
from cyxjax.files import open_plain, read_plain, readable, refuse_special

# IDX: two zero bytes, a type code, the number of dimensions, each as big-endian uint32, then the values.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# What an archive may unzip to: pictures come to some 5 times, a bomb to 1000.
_LEAST_LIMIT, _MOST_TIMES = 1 << 24, 100
_CIFAR_SIDE, _CIFAR_CHANNELS = 32, 3
_CIFAR_RECORD = 1 + _CIFAR_CHANNELS * _CIFAR_SIDE**2  # the label, then the red, green and blue planes


def read_bytes(path: Path) -> bytes:
    """The file's bytes, unzipped if it begins as gzip does, whatever its name."""
    with readable(path):
        raw = read_plain(path)
        if raw[:2] != b"\x1f\x8b":
            return raw
        most = _LEAST_LIMIT + _MOST_TIMES * len(raw)
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            unzipped = file.read(most + 1)
    if len(unzipped) > most:
        raise DataError(f"{path}: {len(raw)} bytes unzip to more than {most}. HINT: fetch the file again.")
    return unzipped


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
    """The arrays in an .npz file by name. Raises: DataError, for pickled content too."""
    hint = "write it with np.savez, numbers and no Python objects"
    # opened here: numpy leaves its own handle open when the file is not an archive
    with (
        readable(path, hint=hint),
        open_plain(path, "rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}


def read_npy(path: Path) -> np.ndarray:
    """A memory map of an .npy file: read from disk row by row, when a row is asked for."""
    with readable(path, hint="write it with np.save"):
        refuse_special(path)
        return np.load(path, mmap_mode="r", allow_pickle=False)


def read_csv(
    path: Path, target: str | None = None
) -> tuple[npt.NDArray[np.float32], np.ndarray, list[str], list[str]]:
    """Features float32 (N, F), targets (N,), names of classes and of features, of a CSV file with a header.

    The target is the column `target`, or the last. Targets are int32 class numbers where they are words
    (sorted; then named in the third result) or whole numbers (int64 beyond int32), else float32.

    Raises: DataError naming the line and column of a value that is missing or not a number.
    """
    header, rows, _ = _csv_rows(path)
    name = header[-1] if target is None else target
    if name not in header:
        raise DataError(f"{path}: no column {name!r}. HINT: {nearest(name, header)}")
    column = header.index(name)
    features = [
        [_number(path, line, header[i], value) for i, value in enumerate(row) if i != column]
        for line, row in enumerate(rows, 2)
    ]
    targets, classes = _csv_targets([row[column] for row in rows])
    names = header[:column] + header[column + 1 :]
    return np.array(features, np.float32).reshape(len(rows), len(names)), targets, classes, names


def read_table(path: Path, names: Sequence[str] = ()) -> npt.NDArray[np.float32]:
    """All columns, float32 (N, F), of a CSV file. A first row of numbers is a sample, any other a header.

    Whole numbers that rise are a header, as pandas writes 0, 1, 2; so are more than 7 that rise or fall, such
    as the wavelengths of spectra. Where the columns' `names` are known, a header of these in any order says
    which is which; one of numbers says nothing.
    Raises: DataError as `read_csv`, and for a header of other names.
    """
    header, rows, first = _csv_rows(path, names)
    cells = [
        [_number(path, line, header[i], value) for i, value in enumerate(row)]
        for line, row in enumerate(rows, first)
    ]
    table = np.array(cells, np.float32).reshape(len(rows), len(header))
    return table[:, _places(path, header, names)] if first == 2 else table


def _places(path: Path, header: list[str], names: Sequence[str]) -> list[int]:
    """Where in `header` each of `names` stands; as they stand where nothing is known or it names none."""
    wanted = [name.strip() for name in names]
    if sorted(wanted) == sorted(header) and len(set(wanted)) == len(wanted):
        return [header.index(name) for name in wanted]
    if len(set(wanted)) == len(wanted) > 0 and not _is_numbers(header):
        raise DataError(
            f"{path}: columns {', '.join(header)}; the run was trained on {', '.join(wanted)}. "
            "HINT: give these, in any order."
        )
    return list(range(len(header)))


def _csv_rows(path: Path, bare: Sequence[str] | None = None) -> tuple[list[str], list[list[str]], int]:
    """(header, rows below it, number of the first of them). bare: none need be, of these names if there."""
    options = {"newline": "", "encoding": "utf-8-sig"}
    with readable(path, hint="save it as UTF-8 text"), open_plain(path, "r", **options) as file:
        header, *rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row] or [[]]
    first = 2
    if bare is not None and sorted(bare) != sorted(header) and _is_sample(header):
        header, rows, first = [str(i + 1) for i in range(len(header))], [header, *rows], 1
    if not rows or len(header) < 2:
        raise DataError(
            f"{path}: {len(rows)} rows of {len(header)} columns. HINT: give a header and data rows."
        )
    for line, row in enumerate(rows, first):
        if len(row) != len(header):
            above = "the header" if first == 2 else "row 1"
            raise DataError(
                f"{path}, row {line}: {len(row)} values; {above} has {len(header)}. HINT: correct that row."
            )
    return header, rows, first


def _is_sample(row: list[str]) -> bool:
    """Whether `row` is numbers that cannot be a header's: those only rise (0, 1, 3) or are a long scale."""
    if not _is_numbers(row):
        return False
    if len(row) < 3:  # any two numbers rise or fall
        return row not in (["0", "1"], ["1", "2"])
    steps = np.diff([float(value) for value in row])
    counted = all(value.isdigit() for value in row) and np.all(steps > 0)
    return not (counted or (len(row) > 7 and (np.all(steps > 0) or np.all(steps < 0))))


def _is_numbers(row: list[str]) -> bool:
    try:
        [float(value) for value in row]
    except ValueError:
        return False
    return True


def _number(path: Path, line: int, column: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise DataError(
            f"{path}, row {line}, column {column!r}: {value!r} is not a number. HINT: fill or drop it."
        )
    return number


def _csv_targets(values: list[str]) -> tuple[np.ndarray, list[str]]:
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:  # words
        names, labels = np.unique(values, return_inverse=True)
        return labels.astype(np.int32), names.tolist()
    whole = bool(np.all(numbers == np.rint(numbers)) and numbers.min() >= 0)
    if not whole:
        return numbers.astype(np.float32), []
    return numbers.astype(np.int32 if numbers.max() < 2**31 else np.int64), []
