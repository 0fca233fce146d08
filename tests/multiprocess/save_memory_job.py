"""Prints the peak memory of rank 0 while it saves and restores shares, less the state: FOLDER -> JSON."""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyxjax.core.mesh import local_replicas, num_replicas, put_rows
from cyxjax.core.portable import Share
from cyxjax.distributed import process_group
from cyxjax.train import resume
from cyxjax.train.checkpoints import open_checkpoints

M_MMAP_THRESHOLD = -3  # of malloc.h
LEAVES, ELEMENTS = 12, 2_000_000  # of a replica's share of each: 8 MB


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def leaves_beside(do: Callable[[], Any]) -> float:
    """Peak memory of `do` above the level before it, in units of this process's shares of a leaf."""
    gc.collect()  # also copies that jax has not released
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = kilobytes("VmRSS")
    do()
    return (kilobytes("VmHWM") - before) * 1024 / (4 * ELEMENTS * jax.local_device_count())


def main(folder: str) -> None:
    # Return freed arrays to the system immediately: the high-water mark counts memory held at the same time.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    libc.malloc_trim(0)
    group = process_group.init()
    mesh, mine = group.mesh, local_replicas(group.mesh)
    count = num_replicas(mesh)

    def share(elements: int, value: int) -> Share:
        rows = put_rows(mesh, np.full((len(mine), elements), value, np.float32))
        start, stop = mine.start * elements, mine.stop * elements
        return Share(
            (count * elements,), np.dtype(np.float32), start, stop, False, (len(mine), elements), rows
        )

    def save(step: int, state: dict[str, Share], **options: Any) -> None:
        with open_checkpoints(folder, group, **options) as checkpointer:
            checkpointer.save(step, state)

    def restore(state: dict[str, Share], **options: Any) -> Any:
        return open_checkpoints(folder, group).restore(state, **options).state

    put = resume.placing(mesh, in_place=True)
    state = {f"leaf{i:02d}": share(ELEMENTS, i) for i in range(LEAVES)}
    jax.block_until_ready([leaf.leaf for leaf in state.values()])
    small = {"leaf": share(10, 1)}
    for background in (True, False):
        save(1, small, async_save=background)  # warm-up: code and buffers that are loaded once
    restore(small, put=put)
    found = {
        "save": leaves_beside(lambda: save(2, state, async_save=False)),
        "save in the background": leaves_beside(lambda: save(2, state)),
        "restore all at once": leaves_beside(lambda: restore(state)),
    }
    after: list[Any] = []
    found["restore"] = leaves_beside(lambda: after.append(restore(state, put=put)))
    for i, leaf in enumerate(after[0].values()):
        assert (np.asarray(leaf.addressable_shards[0].data) == i).all()
    if process_group.is_master():
        print(json.dumps(found), flush=True)
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
    main(sys.argv[1])
