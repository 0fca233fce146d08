"""Distinguishes the data given to a call: inputs with targets, or two datasets."""

from typing import Any

import numpy as np

from cyxjax.data.columns import is_frame, matrix_of, stack

_ONE = (bool, int, float, str, np.generic)


def as_arrays(given: list[Any]) -> list[Any]:
    """Inputs and targets as arrays where one is a plain list or a frame: they validate nothing."""
    if len(given) not in (2, 4):
        return given
    return [one for i in range(0, len(given), 2) for one in _as_pair(given[i], given[i + 1])]


def _as_pair(inputs: Any, targets: Any) -> tuple[Any, Any]:
    if is_frame(targets) and len(targets.columns) == 1 and _is_arrays(inputs) | _has_columns(inputs):
        targets = targets[targets.columns[0]]  # as y is kept beside X
    plain = isinstance(targets, list) and bool(targets) and isinstance(targets[0], _ONE)
    if is_frame(inputs) and (plain or (_is_arrays(targets) and not is_frame(targets))):
        inputs = matrix_of(inputs)
    if isinstance(inputs, list) and plain and inputs and not isinstance(inputs[0], tuple | dict):
        inputs = stack(inputs)
    samples = isinstance(targets, list) and bool(targets) and isinstance(targets[0], tuple | dict)
    as_array = isinstance(targets, list) and not samples and _is_arrays(inputs)
    return inputs, np.asarray(targets) if as_array else targets


def _has_columns(data: Any) -> bool:
    return is_frame(data) and len(data.columns) > 1


def is_pair(first: Any, second: Any) -> bool:
    """Whether they are inputs and targets; not training and validation data, which may be pairs themselves.

    Two plain tuples, (X, y) and (X_val, y_val), are data sets; a named tuple (jraph's) is one input.
    """
    plain = [type(one) is tuple for one in (first, second)]
    return _is_arrays(first) and _is_arrays(second) and not all(plain)


def _is_arrays(data: Any) -> bool:
    """An array, or a dict or tuple of arrays, None where an input is left out; not a dataset or loader."""
    if isinstance(data, dict | tuple):
        parts = data.values() if isinstance(data, dict) else data
        return bool(parts) and all(v is None or _is_arrays(v) for v in parts)
    return hasattr(data, "shape") and hasattr(data, "dtype")
