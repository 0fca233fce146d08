"""Orbax's format: its folders of weights are read, any step is exported. Only this module uses orbax.

One process reads and writes alone: no barrier of orbax's is ever entered.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.errors import CheckpointError


def read_tree(folder: Path) -> Any:
    """All arrays that plain orbax keeps in `folder`, host arrays in its own tree. Raises: CheckpointError."""
    import jax
    import orbax.checkpoint as ocp

    handler, folder = _handler(), folder.absolute()
    try:
        as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)  # noqa: E731
        wanted = jax.tree.map(as_numpy, handler.metadata(folder).tree)
        return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=wanted))
    except Exception as error:  # orbax and TensorStore have no family of errors of their own
        raise CheckpointError(
            f"{folder} cannot be read by orbax: {type(error).__name__}: {str(error)[:200]}. "
            "HINT: name the folder of the item itself."
        ) from error


def export(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `arrays` into the new `folder` as a tree nested by the parts of their names, for plain orbax.

    `orbax.checkpoint.PyTreeCheckpointer().restore(folder)` gives {"params": {"Dense_0": {"kernel": ...}}}.
    Raises: whatever orbax and TensorStore raise.
    """
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    with ocp.Checkpointer(_handler(), multiprocessing_options=_alone()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


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
