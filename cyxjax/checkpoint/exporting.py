"""Exports parameters of a step as a safetensors file or an orbax folder, and reads orbax folders.

Only this module uses orbax. One process reads and writes alone, without orbax's barriers.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.checkpoint.arrays import Entry, StoredArrays, write_file
from cyxjax.checkpoint.manifest import Leaf, Manifest
from cyxjax.errors import CheckpointError
from cyxjax.files import readable, replacing

_IN_ROWS = ("local_sgd", "diloco")  # strategies whose replicas have parameters of their own


def entry_of(manifest: Manifest, stored: StoredArrays, leaf: Leaf) -> Entry:
    """A leaf as others use it: where each replica has parameters of its own, a row each, their mean."""
    read, config = partial(stored.whole, leaf.name), manifest.meta.get("config")
    comm = config.get("comm") if isinstance(config, dict) else None  # a checkpoint may be of another program
    if leaf.name.split("/")[0] != "params" or comm not in _IN_ROWS:
        return Entry(leaf.shape, leaf.numpy_dtype, read)

    def mean() -> np.ndarray:
        rows = read()
        found = rows.mean(0, dtype=np.result_type(rows.dtype, np.float32)).astype(rows.dtype)
        return np.where((rows == rows[0]).all(0), rows[0], found)  # the mean of three equal values may round

    return Entry(leaf.shape[1:], leaf.numpy_dtype, mean)


def to_safetensors(path: Path, entries: Mapping[str, Entry], about: Mapping[str, str]) -> None:
    """Writes one file, with one entry in memory; about: texts for its header. Raises: OSError."""
    with replacing(path) as draft:
        write_file(draft, entries, about, mode=0o666)


def to_orbax(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `arrays` into the new `folder` as a tree nested by the parts of their names, for plain orbax.

    `orbax.checkpoint.PyTreeCheckpointer().restore(folder)` gives {"params": {"Dense_0": {"kernel": ...}}};
    arrays without elements are left out.
    Raises: CheckpointError if the folder already exists or cannot be created.
    """
    import orbax.checkpoint as ocp
    from flax.traverse_util import unflatten_dict

    tree = unflatten_dict({name: array for name, array in arrays.items() if array.size}, sep="/")
    try:
        with ocp.Checkpointer(_handler(), multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
    except Exception as error:  # orbax and TensorStore have no common error class
        raise CheckpointError(
            f"{folder}: {str(error)[:300]} HINT: name a new folder where you can write."
        ) from error


def read_tree(folder: Path) -> Any:
    """All arrays in an orbax `folder`, as host arrays in its own tree. Raises: CheckpointError."""
    import jax
    import orbax.checkpoint as ocp

    with readable(folder, CheckpointError, "name the folder of the item itself"):
        handler, folder = _handler(), folder.absolute()
        as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)  # noqa: E731
        wanted = jax.tree.map(as_numpy, handler.metadata(folder).tree)
        return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=wanted))


def _handler() -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, multiprocessing_options=_alone())


def _alone() -> Any:
    """Options with which orbax waits for no other process: only this one is active."""
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"cyxjax_{me}"
    )
