"""Pretrained weights: reading files of other libraries without executing them, and matching names."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cyxjax.checkpoint.tree import named_leaves


class Stored(NamedTuple):
    """One array: its shape and dtype, and a function that reads it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stored":
        return cls(array.shape, array.dtype, lambda: array)


class Weights(NamedTuple):
    """All arrays of a file or folder."""

    arrays: Mapping[str, Stored]
    kind: str  # the recognised format, for messages


def arrays_of(tree: Any) -> dict[str, Stored]:
    """Leaves of nested containers by their path, `a/b/0`, without those that are not arrays of numbers.

    Raises: CheckpointError if two leaves have the same name.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    return {name: Stored.of(array) for name, array in arrays.items() if _is_numbers(array.dtype)}


def _is_numbers(dtype: np.dtype) -> bool:
    return dtype.kind in "biufcV" and dtype.names is None
