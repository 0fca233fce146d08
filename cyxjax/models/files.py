"""A model as one safetensors file, with the architecture as JSON in its header. It holds no code.

Each array is stored under the path of its leaf ("params/0_linear/kernel"), so any safetensors reader can use
the numbers. The header also holds a checksum, so that a flipped bit is an error and not a worse model.
"""

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # teaches numpy the names "bfloat16" and "float8_..."
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from cyxjax.errors import CheckpointError
from cyxjax.files import read_plain, readable, write_whole

PyTree = Any
FORMAT = "1"
_NO_CHECKSUM = "the checksum of all other bytes goes here".ljust(64, "-")  # as long as a sha256 in hex


def save_model(
    path: str | PathLike[str], architecture: dict[str, Any], params: PyTree, model_state: PyTree
) -> None:
    """Writes a model to `path` atomically; missing folders are created.

    `architecture` is JSON, in which numbers may be numpy's; params and model_state are nested dicts of
    arrays, keyed by strings or integers.
    Raises: OSError if the file cannot be written; CheckpointError if a container is not a dict.
    """
    arrays: dict[str, np.ndarray] = {}
    leaves: dict[str, Any] = {}
    for keys, value in flatten_dict({"params": params, "model_state": model_state}).items():
        name = "/".join(map(str, keys))
        if name in arrays or isinstance(value, list | tuple | None):
            raise CheckpointError(
                f"{name} is a {type(value).__name__} or occurs twice, expected nested dicts of arrays. "
                "HINT: save the model's params and model_state, not the optimizer's state."
            )
        # ascontiguousarray would turn a single number of shape () into shape (1,).
        arrays[name] = np.asarray(value, order="C")
        leaves[name] = {"path": keys, "dtype": arrays[name].dtype.name}
    described = json.dumps(
        {"architecture": architecture, "leaves": leaves}, sort_keys=True, default=lambda value: value.item()
    )
    metadata = {"cyxjax_format": FORMAT, "model": described, "sha256": _NO_CHECKSUM}
    data = safetensors.numpy.save(arrays, metadata)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data.replace(_NO_CHECKSUM.encode(), _checksum(data).encode(), 1))


def read_model(path: str | PathLike[str]) -> tuple[dict[str, Any], PyTree, PyTree]:
    """(architecture, params, model_state) from a file that `save_model` wrote, arrays bit for bit.

    Raises: CheckpointError if the file is missing, cut short, damaged, or of another format.
    """
    with readable(path, CheckpointError):
        data = read_plain(path)
        tensors = dict(safetensors.deserialize(data))
    described = json.loads(_checked_metadata(path, data)["model"])
    arrays: dict[tuple, np.ndarray] = {}
    for name, leaf in described["leaves"].items():
        # Own code, because safetensors.numpy (0.8) writes bfloat16 but cannot read it.
        flat = np.frombuffer(tensors[name]["data"], np.dtype(leaf["dtype"]))
        arrays[tuple(leaf["path"])] = flat.reshape(tensors[name]["shape"]).copy()
    trees = unflatten_dict(arrays)
    return described["architecture"], trees.get("params", {}), trees.get("model_state", {})


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checked_metadata(path: str | PathLike[str], data: bytes) -> dict[str, str]:
    """The text entries of the header (8 bytes of length, then JSON), after the file passed its checksum."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    found, written = metadata.get("cyxjax_format"), metadata.get("sha256", "")
    if found != FORMAT:
        raise CheckpointError(
            f"{path} is a safetensors file with cyxjax_format {found}, expected {FORMAT}. "
            "HINT: update cyxjax if the number is higher; if it is None, use safetensors.numpy.load_file."
        )
    if _checksum(data.replace(written.encode(), _NO_CHECKSUM.encode(), 1)) != written:
        raise CheckpointError(
            f"{path} is damaged: its contents do not match the checksum written with them. "
            "HINT: use another copy, and check the disk that this one came from."
        )
    return metadata
