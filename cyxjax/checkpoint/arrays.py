"""Named host arrays in a folder and back, in orbax's format. The only file that knows orbax.

One process writes and any process reads alone: no barrier of orbax's is ever entered, so a dead peer
cannot hold a save. Keys inside the store are positions plus a readable tail, never paths, so a leaf may
have any name.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.checkpoint.manifest import Leaf
from cyxjax.errors import CheckpointError

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `arrays` into `folder`, which must not exist yet. Arrays of size 0 have no bytes: left out.

    Raises: whatever orbax and TensorStore raise; a full disk is a plain Exception whose text holds
        RESOURCE_EXHAUSTED or "No space left on device".
    """
    import orbax.checkpoint as ocp

    keyed = {_key(i, name): array for i, (name, array) in enumerate(arrays.items()) if array.size}
    if not keyed:
        folder.mkdir(mode=0o700)
        return
    options = _alone()
    with _errors_told_once(), ocp.Checkpointer(_handler(), multiprocessing_options=options) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(keyed))
    # orbax's own mark of success holds the absolute path it wrote to; the manifest is ours.
    (folder / "commit_success.txt").unlink(missing_ok=True)


def read_arrays(folder: Path, leaves: Sequence[Leaf]) -> dict[str, np.ndarray]:
    """The arrays of `leaves`, by name, as they were given to `write_arrays` (same order of leaves).

    What is stored is compared with `leaves` before a byte of it is read, so a file that claims other
    shapes than its manifest cannot make this allocate more than the manifest says.

    Raises: CheckpointError naming the leaf that is missing, of another shape or dtype, or altered.
    """
    import orbax.checkpoint as ocp

    _refuse_more_than_memory(leaves)
    keys = {_key(i, leaf.name): leaf for i, leaf in enumerate(leaves) if leaf.size}
    found: Mapping[str, np.ndarray] = {}
    if keys:
        handler, path = _handler(), folder
        _refuse_other_arrays(handler.metadata(path).tree, keys)
        wanted = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys}
        found = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted))
    arrays = {leaf.name: np.asarray(found[key]) for key, leaf in keys.items()}
    return {leaf.name: _checked(leaf, arrays) for leaf in leaves}


@contextmanager
def _errors_told_once() -> Iterator[None]:
    """Keeps orbax from logging, with pages of traceback, what its threads raise: we are told too."""
    log = logging.getLogger("absl")

    def is_news(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised" not in record.getMessage()

    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


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


def _refuse_more_than_memory(leaves: Sequence[Leaf]) -> None:
    need_bytes = sum(leaf.num_bytes for leaf in leaves)
    have_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need_bytes > have_bytes:
        raise CheckpointError(
            f"The checkpoint claims {need_bytes} bytes of arrays; this machine has {have_bytes} of memory. "
            "HINT: read it on a larger machine, or check where the file came from."
        )


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


def _checked(leaf: Leaf, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    array = arrays[leaf.name] if leaf.size else np.zeros(leaf.shape, leaf.numpy_dtype)
    problem = leaf.differs_from(array)
    if problem:
        raise CheckpointError(f"Array {leaf.name!r} came back altered: {problem}. HINT: take another step.")
    return array
