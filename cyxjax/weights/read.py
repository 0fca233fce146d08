"""Reads files of weights as arrays by name; the format is recognised by content, not by file name."""

from pathlib import Path

from cyxjax.checkpoint.exporting import good_step, read_tree
from cyxjax.checkpoint.folders import list_steps
from cyxjax.checkpoint.store import StepStore
from cyxjax.config.load import open_run
from cyxjax.errors import CheckpointError
from cyxjax.files import read_plain
from cyxjax.weights import safetensors_files, torch_files
from cyxjax.weights.stored import Stored, Weights, flattened

_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint")


def read_weights(path: Path) -> Weights:
    """The arrays at `path`: safetensors (a file, or a folder of shards), a run folder of ours or its
    checkpoints, orbax's folder, flax's msgpack, torch's state_dict.

    Raises: CheckpointError naming what was found, for anything else.
    """
    if path.is_dir():
        found = _of_folder(path)
    elif path.is_file():
        found = _of_file(path)
    else:
        raise CheckpointError(f"{path}: no such file or folder. HINT: check the path.")
    if not found.arrays:
        raise CheckpointError(f"{path} ({found.kind}) holds no arrays. HINT: check the path.")
    return found


def _of_folder(folder: Path) -> Weights:
    for steps in (folder, open_run(folder).checkpoints):
        if list_steps(steps):
            return Weights(_of_checkpoints(steps), "checkpoints of cyxjax")
    shards = safetensors_files.read_folder(folder)
    if shards is not None:
        return Weights(shards, "safetensors")
    for inner in (folder, folder / "default"):  # an orbax manager keeps its item there
        if any((inner / name).exists() for name in _ORBAX):
            return Weights(flattened(read_tree(inner), str(folder)), "orbax")
    raise CheckpointError(
        f"{folder} holds no weights that are known: no *.safetensors, no step_*, no orbax metadata. "
        "HINT: name the file itself."
    )


def _of_checkpoints(folder: Path) -> dict[str, Stored]:
    store = StepStore(folder, is_writer=False)
    step, manifest = good_step(store, None)
    stored = store.open(step, manifest)
    return {
        leaf.name: Stored(leaf.shape, leaf.numpy_dtype, lambda name=leaf.name: stored.whole(name))  # type: ignore[misc]
        for leaf in manifest.leaves
        if leaf.name.split("/")[0] in ("params", "model_state")
    }


def _of_file(path: Path) -> Weights:
    if torch_files.is_torch_file(path):
        return Weights(torch_files.read_file(path), "torch")
    with path.open("rb") as file:
        head = file.read(16)
    if head[8:9] == b"{":
        return Weights(safetensors_files.read_file(path), "safetensors")
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        raise CheckpointError(
            f"{path} is a pickle, which could run anything. HINT: in torch 1.6 or later "
            "torch.save(model.state_dict(), path), or safetensors."
        )
    return Weights(_of_msgpack(path), "flax msgpack")


def _of_msgpack(path: Path) -> dict[str, Stored]:
    from flax import serialization

    try:
        return flattened(serialization.msgpack_restore(read_plain(path)), str(path))
    except CheckpointError:
        raise
    except Exception as err:  # msgpack, numpy and flax have no family of errors
        raise CheckpointError(
            f"{path} is not known: no safetensors, torch zip or flax msgpack ({type(err).__name__}). "
            "HINT: check the path, or write it as safetensors."
        ) from err
