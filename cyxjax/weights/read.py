"""Reads files of weights as arrays by name; the format is recognised by content, not by file name."""

import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from cyxjax.checkpoint.arrays import NATIVE, Entry, StoredArrays
from cyxjax.checkpoint.exporting import entry_of, read_tree
from cyxjax.checkpoint.folders import ARRAYS, list_steps
from cyxjax.checkpoint.manifest import MANIFEST, Manifest, dtype_of, find_problems, read_manifest
from cyxjax.checkpoint.restoring import open_step
from cyxjax.config.load import open_run
from cyxjax.errors import CheckpointError
from cyxjax.files import open_plain, read_plain, readable
from cyxjax.weights import Weights, arrays_of, torch_files

INDEX = "model.safetensors.index.json"  # of a folder of shards, in Hugging Face's layout
_MOST_INDEX = 100 << 20
_DTYPES = {code: name for name, code in NATIVE.items()}
_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint")


def read_weights(path: Path) -> Weights:
    """Reads the arrays at `path`: safetensors (a file, or a folder of shards), a run folder of cyxjax, its
    checkpoints or one of them, a folder of orbax, a msgpack file of flax, or a state_dict of torch.

    Raises: CheckpointError for anything else.
    """
    return _of_folder(path) if path.is_dir() else _of_file(path)


def _of_folder(folder: Path) -> Weights:
    if (folder / MANIFEST).is_file():
        return Weights(_of_checkpoint(folder), "a checkpoint of cyxjax")
    for steps in (folder, open_run(folder).checkpoints):
        if list_steps(steps):
            return Weights(_of_state(*open_step(steps)), "checkpoints of cyxjax")
    shards = _of_shards(folder)
    if shards is not None:
        return Weights(shards, "safetensors")
    for inner in (folder, folder / "default"):  # an orbax manager keeps its item there
        if any((inner / name).exists() for name in _ORBAX):
            return Weights(arrays_of(read_tree(inner)), "orbax")
    raise CheckpointError(
        f"{folder} holds no weights in a known format: no *.safetensors, no step_*, no orbax metadata. "
        "HINT: give the path of the file itself."
    )


def _of_checkpoint(folder: Path) -> dict[str, Entry]:
    """The arrays of the step in `folder`, whatever its name is. Raises: CheckpointError if it is damaged."""
    manifest = read_manifest(folder)
    if problems := find_problems(folder, manifest.step):
        raise CheckpointError(f"{folder}: {'; '.join(problems)}. HINT: name another checkpoint.")
    return _of_state(manifest, StoredArrays(folder / ARRAYS, manifest.leaf_of))


def _of_state(manifest: Manifest, stored: StoredArrays) -> dict[str, Entry]:
    kept = [leaf for leaf in manifest.leaves if leaf.name.split("/")[0] in ("params", "model_state")]
    return {leaf.name: entry_of(manifest, stored, leaf) for leaf in kept}


def _of_file(path: Path) -> Weights:
    with readable(path, CheckpointError), open_plain(path, "rb") as file:
        head = file.read(16)
    if head[8:9] == b"{":
        return Weights(_of_safetensors(path), "safetensors")
    if zipfile.is_zipfile(path):
        return Weights(torch_files.read_file(path), "torch")
    return Weights(_of_msgpack(path), "flax msgpack")


def _of_msgpack(path: Path) -> dict[str, Entry]:
    from flax import serialization

    hint = "expected safetensors, a state_dict that torch 1.6 or later saved, or msgpack of flax"
    with readable(path, CheckpointError, hint):
        return arrays_of(serialization.msgpack_restore(read_plain(path)))


def _of_safetensors(path: Path) -> dict[str, Entry]:
    """The arrays of one file. Raises: CheckpointError if the header does not match the contents."""
    with readable(path, CheckpointError), safe_open(path, framework="numpy") as file:
        return {name: _stored(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def _stored(path: Path, name: str, entry: Any) -> Entry:
    return Entry(tuple(entry.get_shape()), dtype_of(_DTYPES[entry.get_dtype()]), partial(_read, path, name))


def _read(path: Path, name: str) -> np.ndarray:
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor(name)


def _of_shards(folder: Path) -> dict[str, Entry] | None:
    """The arrays of a folder's files, or of those that its index names; None if it has neither.

    Raises: CheckpointError if the index names files or arrays that do not exist.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        return _joined({path: _of_safetensors(path) for path in files}) if files else None
    with readable(index, CheckpointError):
        table = json.loads(read_plain(index, _MOST_INDEX))["weight_map"]
        names = {str(name): str(file) for name, file in table.items()}
    if outside := [file for file in names.values() if Path(file).name != file or file in (".", "..")]:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, which is not in its folder. HINT: download the index again."
        )
    found = _joined({folder / file: _of_safetensors(folder / file) for file in sorted(set(names.values()))})
    with readable(index, CheckpointError, "an array that it lists is in no file: download the files again"):
        return {name: found[name] for name in names}


def _joined(files: dict[Path, dict[str, Entry]]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path, arrays in files.items():
        if twice := sorted(found.keys() & arrays.keys()):
            raise CheckpointError(f"{path} repeats {twice[0]!r}. HINT: give the path of one file.")
        found |= arrays
    return found
