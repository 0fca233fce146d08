"""Rows of an array in memory, gathered in another order: by several threads where a batch is large."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

LARGE_BYTES = 4 << 20
"""A batch from which on threads pay, and reading ahead: one thread copies 128 images of 224x224x3, 77 MB, in
20 ms, half of it for fresh pages, while an H100 takes 26 ms for a step of ResNet-50 on them."""
_THREADS = 8  # memory is not faster by more


def rows(leaf: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """`leaf[indices]`; by `take`, twice as fast, where that does not copy the whole array first."""
    if not (leaf.flags.c_contiguous and leaf.flags.aligned and leaf.dtype.isnative):
        return leaf[indices]
    array, threads = np.asarray(leaf), min(os.cpu_count() or 1, _THREADS)
    is_large = array[:1].nbytes * len(indices) >= LARGE_BYTES
    return _by_threads(threads, array, indices) if is_large and threads > 1 else array.take(indices, axis=0)


def _by_threads(threads: int, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    if not (-len(array) <= indices.min() and indices.max() < len(array)):
        raise IndexError(f"rows {indices.min()} to {indices.max()} of an array of {len(array)}")
    made = np.empty((len(indices), *array.shape[1:]), array.dtype)
    parts = zip(np.array_split(made, threads), np.array_split(indices % len(array), threads), strict=True)
    # A pool for each batch: its start costs 0.3 ms, and no thread is left behind. "clip": nothing is out of
    # range, and numpy then writes straight into `out`.
    with ThreadPoolExecutor(threads, "cyxjax-gather") as pool:
        list(pool.map(lambda part: array.take(part[1], axis=0, out=part[0], mode="clip"), parts))
    return made
