"""Arrays in a file, by name, read on access."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cyxjax.errors import CheckpointError


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


def flattened(tree: Any, what: str, above: str = "") -> dict[str, Stored]:
    """Leaves of nested dicts and lists by their path, `a/b/0`; what is no array of numbers is left out."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(key), value) for key, value in enumerate(tree)]
    else:
        array = np.asarray(tree)
        is_numbers = array.dtype.kind in "biufcV" and array.dtype.names is None
        return {above: Stored.of(array)} if above and is_numbers else {}
    found: dict[str, Stored] = {}
    for key, value in items:
        for name, leaf in flattened(value, what, f"{above}/{key}" if above else key).items():
            if name in found:
                raise CheckpointError(f"{what}: two arrays are named {name!r}. HINT: rename one.")
            found[name] = leaf
    return found
