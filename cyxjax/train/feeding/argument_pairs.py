"""Two arguments of `fit`: the inputs and targets of one dataset, or training and validation data."""

from typing import Any

import jax
import numpy as np

from cyxjax.core.trees import kind_of
from cyxjax.data.columns import TARGET_NAMES, is_arrays, is_frame, matrix_of, stack
from cyxjax.data.sources import as_dataset
from cyxjax.errors import DataError

_SCALARS = (bool, int, float, str, np.generic)


def one_dataset(data: Any) -> Any:
    """`data` alone as a dataset, where it is arrays or samples: it is not the X of a pair (X, y)."""
    return as_dataset(data) if isinstance(data, list) or is_frame(data) or is_arrays(data) else data


def paired(X: Any, y: Any = None) -> Any:
    """Inputs and targets as one object; X alone, which holds both, if there is no y."""
    return X if y is None else as_pair(X, y) or (X, y)


def as_pair(inputs: Any, targets: Any) -> tuple[Any, Any] | None:
    """Inputs and targets as arrays, also from lists and frames; None for two datasets.

    Two plain tuples, (X, y) and (X_val, y_val), are datasets, and so are two dicts or named tuples with equal
    names of which one is a target's; any other named tuple (jraph's) is one input.
    """
    if is_frame(targets) and len(targets.columns) == 1:
        targets = targets[targets.columns[0]]
    if isinstance(targets, list) and targets:
        plain = isinstance(targets[0], _SCALARS) or (
            is_arrays(inputs) and not isinstance(targets[0], tuple | dict)
        )
        targets = np.asarray(targets) if plain else targets
    if not is_arrays(targets):
        return None
    if is_frame(inputs):
        inputs = matrix_of(inputs)
    elif isinstance(inputs, list) and inputs and not isinstance(inputs[0], tuple | dict):
        inputs = stack(inputs)
    are_tuples = type(inputs) is tuple and type(targets) is tuple
    names = _names_in(inputs)
    are_datasets = are_tuples or (names == _names_in(targets) and not names.isdisjoint(TARGET_NAMES))
    return (inputs, targets) if is_arrays(inputs) and not are_datasets else None


def refuse_unclear(train: Any, val: Any) -> None:
    """Raises: DataError for two tuples of arrays that may be inputs and targets: all have the same shape."""
    is_plain = type(train) is tuple and type(val) is tuple and is_arrays(train) and is_arrays(val)
    if not is_plain or any(isinstance(part, tuple | dict) for part in train):
        return
    kinds = {kind_of(leaf) for leaf in jax.tree.leaves((train, val))}
    if len(kinds) == 1:
        raise DataError(
            f"two tuples of arrays of one kind ({kinds.pop()}): they may be training and validation data, or "
            "several inputs and several targets. HINT: fit(X, y, X_val, y_val), or fit(((x1, x2), (y1, y2)))."
        )


def _names_in(data: Any) -> set[str]:
    """The names of the parts of a dict or a named tuple."""
    return set(data) if isinstance(data, dict) else set(getattr(data, "_fields", ()))
