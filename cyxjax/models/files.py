"""A model as one file: safetensors, with the architecture as JSON in its header. Nothing in it can run.

Each array is stored under the path of its leaf ("params/0_linear/kernel"), so any safetensors reader can use
the numbers. The header also holds a checksum: a flipped bit is an error here, not a slightly worse model.
"""

import hashlib
import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # teaches numpy the names "bfloat16" and "float8_..."
import numpy as np
import safetensors
import safetensors.numpy

from cyxjax.errors import CheckpointError
from cyxjax.files import read_plain, readable, write_whole

PyTree = Any
Key = str | int
FORMAT = 1  # raise it when a file of this version could not be read by the version before
_NO_CHECKSUM = "the checksum of all other bytes goes here".ljust(64, "-")  # as long as a sha256 in hex


def save_model(
    path: str | PathLike[str], architecture: dict[str, Any], params: PyTree, model_state: PyTree
) -> None:
    """Writes a model to `path`, all of it or nothing; missing folders are made.

    `architecture` is JSON; params and model_state are nested dicts of arrays, keyed by strings or integers.
    Raises: OSError if the file cannot be written; CheckpointError if a container is not a dict.
    """
    arrays: dict[str, np.ndarray] = {}
    leaves: dict[str, Any] = {}
    for keys, value in _leaves({"params": params, "model_state": model_state}):
        name = "/".join(map(str, keys))
        if name in arrays:
            raise CheckpointError(f"Two arrays of the model are both named {name}. HINT: rename one of them.")
        # ascontiguousarray would turn a single number of shape () into shape (1,).
        arrays[name] = np.asarray(value, order="C")
        leaves[name] = {"path": keys, "dtype": arrays[name].dtype.name}
    described = json.dumps({"architecture": architecture, "leaves": leaves}, sort_keys=True)
    metadata = {"cyxjax_format": str(FORMAT), "model": described, "sha256": _NO_CHECKSUM}
    data = safetensors.numpy.save(arrays, metadata)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data.replace(_NO_CHECKSUM.encode(), _checksum(data).encode(), 1))


def read_model(path: str | PathLike[str]) -> tuple[dict[str, Any], PyTree, PyTree]:
    """(architecture, params, model_state) of a file that `save_model` wrote, arrays bit for bit.

    Raises: CheckpointError if the file is missing, cut short, damaged, of a newer format, or not ours.
    """
    with readable(path, CheckpointError):
        data = read_plain(path)
        tensors = dict(safetensors.deserialize(data))
    described = json.loads(_checked_metadata(path, data)["model"])
    trees: dict[Key, Any] = {"params": {}, "model_state": {}}
    for name, leaf in described["leaves"].items():
        # Ours because safetensors.numpy (0.8) writes bfloat16 but cannot read it.
        flat = np.frombuffer(tensors[name]["data"], np.dtype(leaf["dtype"]))
        _insert(trees, leaf["path"], flat.reshape(tensors[name]["shape"]).copy())
    return described["architecture"], trees["params"], trees["model_state"]


def _leaves(tree: PyTree, keys: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """(path, leaf) of each leaf of nested dicts, in sorted order."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from _leaves(tree[key], (*keys, key))
    elif isinstance(tree, list | tuple) or tree is None:
        raise CheckpointError(
            f"{'/'.join(map(str, keys))} is a {type(tree).__name__}, expected dicts of arrays. "
            "HINT: save the model's params and model_state, not the optimizer's."
        )
    else:
        yield keys, tree


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checked_metadata(path: str | PathLike[str], data: bytes) -> dict[str, str]:
    """The text entries of the header (8 bytes of length, then JSON), once the whole file has proved sound."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    if not metadata.keys() >= {"cyxjax_format", "model", "sha256"}:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a model saved by cyxjax (no cyxjax_format in its "
            "header). HINT: read other files with safetensors.numpy.load_file."
        )
    if _checksum(data.replace(metadata["sha256"].encode(), _NO_CHECKSUM.encode(), 1)) != metadata["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its contents do not match the checksum written with them. "
            "HINT: take another copy, and check the disk it came from."
        )
    if int(metadata["cyxjax_format"]) > FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata['cyxjax_format']}, this version of cyxjax reads up to {FORMAT}. "
            "HINT: update cyxjax."
        )
    return metadata


def _insert(tree: dict[Key, Any], keys: list[Key], value: np.ndarray) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value
