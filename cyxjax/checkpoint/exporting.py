"""Parameters of a step for other programs: one safetensors file, or orbax's folder, which is read too.

Only this module uses orbax. One process reads and writes alone: no barrier of orbax's is ever entered.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.checkpoint.arrays import Entry, write_file
from cyxjax.errors import CheckpointError
from cyxjax.files import readable, replacing


def to_safetensors(path: Path, entries: Mapping[str, Entry], about: Mapping[str, str]) -> None:
    """One file, a block of an entry in memory at a time; about: texts for its header. Raises: OSError."""
    with replacing(path) as draft:
        write_file(draft, entries, about, mode=0o666)


def to_orbax(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `arrays` into the new `folder` as a tree nested by the parts of their names, for plain orbax.

    `orbax.checkpoint.PyTreeCheckpointer().restore(folder)` gives {"params": {"Dense_0": {"kernel": ...}}};
    arrays without elements are left out.
    Raises: CheckpointError if the folder is there, or cannot be made.
    """
    import orbax.checkpoint as ocp
    from flax.traverse_util import unflatten_dict

    tree = unflatten_dict({name: array for name, array in arrays.items() if array.size}, sep="/")
    try:
        with ocp.Checkpointer(_handler(), multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))
    except Exception as error:  # orbax and TensorStore have no family of errors of their own
        raise CheckpointError(
            f"{folder}: {str(error)[:300]} HINT: name a new folder in a place this user may write."
        ) from error


def read_tree(folder: Path) -> Any:
    """All arrays that plain orbax keeps in `folder`, host arrays in its own tree. Raises: CheckpointError."""
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
    """Options under which orbax waits for no other process: this one is the only active one."""
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"cyxjax_{me}"
    )
