"""Pretrained weights: files of other libraries, and matching of names. Nothing in them is executed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cyxjax.checkpoint.tree import named_leaves


class Stored(NamedTuple):
    """One array: what it is, and how to read it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stored":
        return cls(array.shape, array.dtype, lambda: array)


class Weights(NamedTuple):
    """All arrays of a file or folder."""

    arrays: Mapping[str, Stored]
    kind: str  # what it was taken for, for people


def arrays_of(tree: Any) -> dict[str, Stored]:
    """Leaves of nested containers by their path, `a/b/0`; what is no array of numbers is left out.

    Raises: CheckpointError where two have one name.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    return {name: Stored.of(array) for name, array in arrays.items() if _is_numbers(array.dtype)}


def _is_numbers(dtype: np.dtype) -> bool:
    return dtype.kind in "biufcV" and dtype.names is None
