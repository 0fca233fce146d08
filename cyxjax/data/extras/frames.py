"""Frames of pandas and polars, recognised by what they can do: columns of numbers as one array."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cyxjax.data.columns import Columns, split
from cyxjax.errors import DataError


def is_frame(data: Any) -> bool:
    return hasattr(data, "to_numpy") and hasattr(data, "columns")


def of_frame(frame: Any, columns: Columns) -> tuple[Any, Any]:
    """(inputs, targets): numbers as one array (N, columns), unless `columns` names them; targets as they are.

    Raises: DataError naming an input column that holds no numbers.
    """
    given, targets = split({str(name): frame[name] for name in frame.columns}, columns)
    if not isinstance(given, Mapping):
        inputs: Any = _numbers(str(columns.inputs or "of inputs"), given)
    else:
        found = {name: _numbers(name, column) for name, column in given.items()}
        inputs = found if columns.inputs else np.stack(list(found.values()), 1)
    return inputs, inputs if targets is given else _array(targets)


def matrix_of(frame: Any) -> np.ndarray:
    """All columns as one array (N, columns). Raises: DataError naming one that holds no numbers."""
    return np.stack([_numbers(str(name), frame[name]) for name in frame.columns], 1)


def _array(column: Any) -> np.ndarray:
    return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)


def _numbers(name: str, column: Any) -> np.ndarray:
    array = _array(column)
    if array.dtype.kind == "O":
        if lacking := [row for row, one in enumerate(array) if _is_missing(one)]:
            raise DataError(
                f"column {name!r} has no value in {len(lacking)} rows, the first is {lacking[0]}. "
                "HINT: fill them, df.fillna(0), or leave these rows out, df.dropna()."
            )
        array = np.array(array.tolist())
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"column {name!r} holds {str(array.reshape(-1)[0])!r}; expected numbers. HINT: leave it out, or "
            f"number its values: df[{name!r}].astype('category').cat.codes."
        )
    return array


def _is_missing(one: Any) -> bool:
    return (
        one is None or type(one).__name__ in ("NAType", "NaTType") or (isinstance(one, float) and one != one)
    )
