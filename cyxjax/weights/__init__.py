"""Pretrained weights: reading files of other libraries without executing them, and matching names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cyxjax.checkpoint.arrays import Entry
from cyxjax.checkpoint.tree import named_leaves


class Weights(NamedTuple):
    """All arrays of a file or folder."""

    arrays: Mapping[str, Entry]
    kind: str  # the recognised format, for messages


def arrays_of(tree: Any) -> dict[str, Entry]:
    """Leaves of nested containers by their path, `a/b/0`, without those that are not arrays of numbers.

    Raises: CheckpointError if two leaves have the same name.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    return {
        name: Entry.of(array)
        for name, array in arrays.items()
        if array.dtype.kind in "biufcV" and array.dtype.names is None
    }
