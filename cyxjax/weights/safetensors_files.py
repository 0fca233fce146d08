"""safetensors: one file, or a folder of shards with an index (Hugging Face's layout).

The format's own library reads a file; it compares the header with the file before it makes arrays.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from cyxjax.errors import CheckpointError
from cyxjax.files import read_plain, refuse_special
from cyxjax.weights.stored import Stored, dtype_of

INDEX = "model.safetensors.index.json"
_MOST_INDEX = 100 << 20
_DTYPES = {
    "BOOL": "bool",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def read_file(path: Path) -> dict[str, Stored]:
    """The arrays of one file. Raises: CheckpointError for a header that is not what the file holds."""
    try:
        refuse_special(path)
        with safe_open(path, framework="numpy") as file:
            return {name: _stored(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, SafetensorError) as err:
        raise CheckpointError(
            f"{path} is cut short, or no safetensors file ({type(err).__name__}: {str(err)[:200]}). "
            "HINT: take another copy."
        ) from err


def _stored(path: Path, name: str, entry: Any) -> Stored:
    return Stored(tuple(entry.get_shape()), dtype_of(_DTYPES[entry.get_dtype()]), partial(_read, path, name))


def _read(path: Path, name: str) -> np.ndarray:
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor(name)


def read_folder(folder: Path) -> dict[str, Stored] | None:
    """The arrays of a folder's files, those that its index names if it has one; None if it has neither.

    Raises: CheckpointError for an index that names other files or arrays than are there.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        return _joined({path: read_file(path) for path in files}) if files else None
    try:
        table = json.loads(read_plain(index, _MOST_INDEX))["weight_map"]
        names = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise CheckpointError(
            f"{index} cannot be read ({type(err).__name__}: {err}). HINT: fetch it again."
        ) from err
    if outside := [file for file in names.values() if Path(file).name != file or file in (".", "..")]:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, which is not in its folder. HINT: fetch it again."
        )
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
