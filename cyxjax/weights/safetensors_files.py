"""safetensors: one file, or a folder of shards with an index (Hugging Face's layout).

Read here: the header is JSON, and its sizes are compared with the file before arrays are made.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.errors import CheckpointError
from cyxjax.files import read_plain, refuse_special
from cyxjax.weights.stored import Stored, dtype_of

INDEX = "model.safetensors.index.json"
_MOST_HEADER = 100 << 20  # as the format's own reader
_DTYPES = {
    "BOOL": "bool",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def read_file(path: Path) -> dict[str, Stored]:
    """The arrays of one file. Raises: CheckpointError for a header that is not what the file holds."""
    try:
        refuse_special(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no table")
        header.pop("__metadata__", None)
        return {name: _stored(path, 8 + length, size, entry) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as err:
        raise CheckpointError(
            f"{path} is cut short, or no safetensors file ({type(err).__name__}: {str(err)[:200]}). "
            "HINT: take another copy."
        ) from err


def _stored(path: Path, start: int, size: int, entry: dict[str, Any]) -> Stored:
    shape, dtype = tuple(int(n) for n in entry["shape"]), dtype_of(_DTYPES[entry["dtype"]])
    first, stop = (int(n) for n in entry["data_offsets"])
    count = int(np.prod(shape, dtype=object))
    if min((*shape, first), default=0) < 0 or stop - first != count * dtype.itemsize or start + stop > size:
        raise ValueError(
            f"an array of {dtype.name}{list(shape)} at bytes {first} to {stop} of {size - start}"
        )
    return Stored(shape, dtype, partial(_read, path, start + first, shape, dtype))


def _read(path: Path, at: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    return np.fromfile(path, np.uint8, count * dtype.itemsize, offset=at).view(dtype).reshape(shape)


def read_folder(folder: Path) -> dict[str, Stored] | None:
    """The arrays of a folder's files, those that its index names if it has one; None if it has neither.

    Raises: CheckpointError for an index that names other files or arrays than are there.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        return _joined({path: read_file(path) for path in files}) if files else None
    try:
        table = json.loads(read_plain(index, _MOST_HEADER))["weight_map"]
        names = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise CheckpointError(
            f"{index} cannot be read ({type(err).__name__}: {err}). HINT: fetch it again."
        ) from err
    if outside := [file for file in names.values() if Path(file).name != file or file in (".", "..")]:
        raise CheckpointError(f"{index} names {outside[0]!r}, no file beside it. HINT: fetch it again.")
    found = _joined({folder / file: read_file(folder / file) for file in sorted(set(names.values()))})
    if missing := sorted(names.keys() - found.keys()):
        raise CheckpointError(
            f"{folder}: {names[missing[0]]} holds no array {missing[0]!r}, which {INDEX} lists. "
            "HINT: fetch the files again."
        )
    return {name: found[name] for name in names}


def _joined(files: dict[Path, dict[str, Stored]]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path, arrays in files.items():
        if twice := sorted(found.keys() & arrays.keys()):
            raise CheckpointError(f"{path} holds {twice[0]!r} once more. HINT: name one file of the folder.")
        found |= arrays
    return found
