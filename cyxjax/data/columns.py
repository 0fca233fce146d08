"""Splits samples into inputs and targets: tuples by position, records and frames by column name.

(x,) and x alone      -> inputs x, targets x (an autoencoder's)
(x, y)                -> inputs x, targets y
(x1, x2, ..., y)      -> inputs (x1, x2, ...), targets y
{"image": x, "label": y} -> the targets column is the one named as in TARGET_NAMES; the rest are inputs
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cyxjax.errors import DataError, nearest

TARGET_NAMES = ("targets", "target", "labels", "label", "y")


@dataclass(frozen=True)
class Columns:
    """Names of the input and target columns of a record; None finds them."""

    inputs: str | tuple[str, ...] | None = None
    targets: str | None = None


def split(record: Any, columns: Columns = Columns()) -> tuple[Any, Any]:
    """(inputs, targets) of a tuple, a mapping or a single value."""
    if isinstance(record, Mapping):
        return _split_names(record, columns)
    if not isinstance(record, tuple):
        return record, record
    head = record[:-1] if len(record) > 1 else record
    return head[0] if len(head) == 1 else head, record[-1]


def _split_names(record: Mapping[str, Any], columns: Columns) -> tuple[Any, Any]:
    target = columns.targets or next((name for name in TARGET_NAMES if name in record), None)
    names = columns.inputs or tuple(name for name in record if name != target)
    if isinstance(names, str):
        inputs = _column(record, names)
    elif len(names) == 1:
        inputs = _column(record, names[0])
    else:
        inputs = {name: _column(record, name) for name in names}
    return inputs, inputs if target is None else _column(record, target)


def _column(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise DataError(f"no column {name!r} in the data. HINT: {nearest(name, map(str, record))}")
    return record[name]


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, leaf) of every leaf of nested tuples, named tuples and dicts; None is no leaf."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, tuple):
        names = [f".{field}" for field in getattr(tree, "_fields", ())]
        for i, value in enumerate(tree):
            yield from leaves(value, name + (names[i] if names else f"[{i}]"))
    elif tree is not None:
        yield name, tree


def map_leaves(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`fn` on every leaf of `tree` and the same place in `others`; KeyError or IndexError if they differ."""
    if type(tree) is np.ndarray:  # most trees are one array, and this is asked for in each step
        return fn(tree, *others)
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, tuple):
        values = [map_leaves(fn, value, *(other[i] for other in others)) for i, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return None if tree is None else fn(tree, *others)


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
    array = given = _array(column)
    if given.dtype.kind == "O":
        array = np.array(given.tolist())
    if array.dtype.kind not in "biufc":
        odd = ((row, one) for row, one in enumerate(given) if not isinstance(one, int | float | np.number))
        row, one = next(odd, (0, given[0]))
        raise DataError(
            f"column {name!r} holds {one!s:.60} in row {row}; expected numbers. HINT: leave the column out, "
            f"fill it (df.fillna), or number its values: df[{name!r}].astype('category').cat.codes."
        )
    return array
