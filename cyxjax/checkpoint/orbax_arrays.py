"""Orbax's format: checkpoints of format version 1 are read, any step is exported. Only here is orbax known.

One process reads and writes alone: no barrier of orbax's is ever entered.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.checkpoint.manifest import Leaf
from cyxjax.errors import CheckpointError

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def read_version_1(folder: Path, leaves: Sequence[Leaf]) -> dict[str, np.ndarray]:
    """The arrays of `leaves` that have bytes, by name, as a version-1 checkpoint keeps them.

    What is stored is compared with `leaves` before a byte of it is read, so a file that claims other
    shapes than its manifest cannot make this allocate more than the manifest says.
    Raises: CheckpointError for other arrays; whatever orbax and TensorStore raise for damage.
    """
    import orbax.checkpoint as ocp

    keys = {_key(i, leaf.name): leaf for i, leaf in enumerate(leaves) if leaf.size}
    if not keys:
        return {}
    handler = _handler()
    _refuse_other_arrays(handler.metadata(folder).tree, keys)
    wanted = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys}
    found = handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=wanted))
    return {leaf.name: np.asarray(found[key]) for key, leaf in keys.items()}


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


def _key(position: int, name: str) -> str:
    return f"{position:05d}-{_UNSAFE.sub('.', name)[-100:]}"


def _refuse_other_arrays(stored: Mapping, keys: Mapping[str, Leaf]) -> None:
    if not isinstance(stored, Mapping) or set(stored) != set(keys):
        raise CheckpointError("The stored arrays are not those of the manifest. HINT: take another step.")
    for key, leaf in keys.items():
        shape, dtype = getattr(stored[key], "shape", None), getattr(stored[key], "dtype", None)
        if shape != leaf.shape or str(dtype) != leaf.dtype:
            raise CheckpointError(
                f"Stored array {leaf.name!r} is {dtype}{shape}, its manifest says {leaf.dtype}{leaf.shape}. "
                "HINT: take another step."
            )
