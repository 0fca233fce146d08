"""Samples as inputs and targets, and trees of arrays: tuples by position, records and frames by column name.

(x,) and x alone      -> inputs x, targets x (an autoencoder's)
(x, y)                -> inputs x, targets y
(x1, x2, ..., y)      -> inputs (x1, x2, ...), targets y
[x, y] -> the same as a tuple, unless it holds only numbers and lists: that is one array
{"image": x, "label": y} -> the column with a name in TARGET_NAMES is the target; the others are inputs
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from cyxjax.errors import DataError, nearest

TARGET_NAMES = ("targets", "target", "labels", "label", "y")


@dataclass(frozen=True)
class Columns:
    """Names of the input and target columns of a record; None: found by TARGET_NAMES."""

    inputs: tuple[str, ...] | None = None
    targets: str | None = None

    @classmethod
    def of(cls, inputs: str | Sequence[str] | None, targets: str | None) -> "Columns":
        """From names as a caller passes them."""
        names = (inputs,) if isinstance(inputs, str) else inputs
        return cls(None if names is None else tuple(names), targets)


def split(record: Any, columns: Columns = Columns()) -> tuple[Any, Any]:
    """(inputs, targets) of a tuple, a mapping or a single value. Raises: DataError for a missing column."""
    if isinstance(record, Mapping):
        return _split_names(record, columns)
    if isinstance(record, list) and not all(isinstance(one, int | float | list) for one in record):
        record = tuple(record)
    if not isinstance(record, tuple):
        return record, record
    head = record[:-1] if len(record) > 1 else record
    return head[0] if len(head) == 1 else head, record[-1]


def _split_names(record: Mapping[str, Any], columns: Columns) -> tuple[Any, Any]:
    target = columns.targets or next((name for name in TARGET_NAMES if name in record), None)
    names = columns.inputs or tuple(name for name in record if name != target)
    for name in (*names, *([target] if target else [])):
        if name not in record:
            raise DataError(f"no column {name!r} in the data. HINT: {nearest(name, map(str, record))}")
    inputs = record[names[0]] if len(names) == 1 else {name: record[name] for name in names}
    return inputs, inputs if target is None else record[target]


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, leaf) of every leaf of nested tuples, named tuples and dicts; None is not a leaf."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, tuple):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{name}[{i}]")
    elif tree is not None:
        yield name, tree


def map_leaves(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`fn` of each leaf of `tree` and its counterparts in `others`; KeyError or ValueError if they differ."""
    if type(tree) is np.ndarray:  # fast path: most trees are one array, and this runs in each step
        return fn(tree, *others)
    if isinstance(tree, Mapping):
        return {
            key: map_leaves(fn, tree[key], *(other[key] for other in others))
            for key in dict.fromkeys(chain(tree, *others))
        }
    if isinstance(tree, tuple):
        values = [map_leaves(fn, *parts) for parts in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return None if all(one is None for one in (tree, *others)) else fn(tree, *others)


def as_array(leaf: Any) -> Any:
    """A numpy array that shares the memory of `leaf` if possible; memmaps are returned unchanged. An array of
    the other byte order is copied, a memmap into memory.

    Raises: DataError like `refuse_words`, and for a masked array.
    """
    if hasattr(leaf, "detach"):  # a torch tensor, perhaps on a device and part of a graph
        leaf = leaf.detach().cpu()
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(
            "a masked array, whose mask would be lost. HINT: fill it (x.filled(0)); a mask goes into weights."
        )
    if array.dtype.kind == "O":  # numbers, or rows of equal length, stored as objects
        plain = np.array(array.tolist())
        array = plain if plain.dtype.kind in "biufc" else array
    refuse_words(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def refuse_words(array: np.ndarray) -> None:
    """Raises: DataError for a value that is not a number; its hint makes integer labels of strings."""
    if array.dtype.kind not in "OUSTMm":
        return
    other = next((one for one in array.flat if not isinstance(one, int | float | np.number)), None)
    raise DataError(
        f"found {other!r} in an array of dtype {array.dtype}; expected numbers, and integers as labels. "
        "HINT: class_names, y = np.unique(y, return_inverse=True)."
    )


def collated(batch: Any) -> Any:
    """`batch` with lists of torch's tensors, at any depth, as tuples; other lists are arrays."""

    def of_leaf(leaf: Any) -> Any:
        return tuple(map(collated, leaf)) if _holds_batches(leaf) else leaf

    return map_leaves(of_leaf, batch)


def _holds_batches(leaf: Any) -> bool:
    """Whether `leaf` is a list of tensors of several samples each, or of such lists."""
    is_batch = lambda one: hasattr(one, "detach") and len(one.shape) > 0  # noqa: E731
    return isinstance(leaf, list) and any(is_batch(one) or _holds_batches(one) for one in leaf)


def own_arrays(item: Any) -> Any:
    """`item` with copies of its arrays: a source may read the next sample into the same buffer."""

    def own(leaf: Any) -> Any:
        if type(leaf) is list and not all(isinstance(one, int | float) for one in leaf):
            return [own_arrays(one) for one in leaf]
        return leaf.copy() if isinstance(leaf, np.ndarray | list) else leaf

    return map_leaves(own, item)


def stack_rows(
    rows: Sequence[Any], columns: Columns, indices: Sequence[int] | None = None
) -> tuple[Any, Any]:
    """(inputs, targets) of samples, stacked along a new first dimension; one object if both are the same."""
    pairs = [split(row, columns) for row in rows]
    inputs = stack([x for x, _ in pairs], indices)
    return inputs, inputs if all(y is x for x, y in pairs) else stack([y for _, y in pairs], indices)


def stack(items: Sequence[Any], indices: Sequence[int] | None = None) -> Any:
    """Items (arrays, numbers, tuples or dicts of them) stacked leaf by leaf along a new first dimension.

    indices: of the items in their dataset, for errors; None: their places among `items`.
    Raises: DataError for items of different structure, and for words.
    """
    try:
        whole = map_leaves(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *items)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(
            f"samples cannot be stacked: {_first_difference(items, indices)}{type(error).__name__}: {error}. "
            "HINT: make each a tuple (input, target) of arrays of equal shape, padded to one length."
        ) from error
    for _, leaf in leaves(whole):
        refuse_words(leaf)
    return whole


def _first_difference(items: Sequence[Any], indices: Sequence[int] | None) -> str:
    """`sample 17 is (5,), sample 1 is (8,): ` for the first item unlike the one before; "" if none is."""
    shapes = [", ".join(f"{name} {_shape(leaf)}".strip() for name, leaf in leaves(item)) for item in items]
    numbers = range(len(items)) if indices is None else indices
    for at in range(1, len(items)):
        if shapes[at] != shapes[at - 1]:
            return f"sample {numbers[at]} is {shapes[at]}, sample {numbers[at - 1]} is {shapes[at - 1]}: "
    return ""


def _shape(leaf: Any) -> object:
    try:
        return np.shape(leaf)
    except ValueError:
        return "a list of different lengths"


def refuse_batches(items: list[Any], columns: Columns) -> None:
    """Accepts a list of samples. Raises: DataError if it looks like batches, with one target per row."""
    inputs, targets = split(items[0] if items else None, columns)
    if targets is inputs:
        return
    shapes = [tuple(np.shape(leaf)) for _, leaf in leaves(inputs)]
    shape = () if isinstance(targets, tuple | Mapping) else tuple(np.shape(targets))
    wide = [one for one in shapes if len(one) > 1]
    of_rows = len(shape) == 1 or (len(shape) == 2 and all(shape != one[:2] for one in wide))  # else a mask
    if wide and of_rows and {one[:1] for one in shapes} == {shape[:1]} and shape[0] > 1:
        raise DataError(
            f"a list of {len(items)} whose first has inputs of shape {wide[0]} and a target of shape {shape}:"
            f" batches, or samples of {shape[0]} targets? HINT: fit(cx.data.Batches(data)) for batches; "
            "for samples pass arrays, fit(np.stack(inputs), np.stack(targets))."
        )


def is_arrays(data: Any) -> bool:
    """Whether `data` is an array, or a dict or tuple of arrays with None for an input that is left out."""
    if isinstance(data, dict | tuple):
        parts = data.values() if isinstance(data, dict) else data
        return bool(parts) and all(v is None or is_arrays(v) for v in parts)
    return hasattr(data, "shape") and hasattr(data, "dtype")


def is_frame(data: Any) -> bool:
    return hasattr(data, "to_numpy") and hasattr(data, "columns")


def of_frame(frame: Any, columns: Columns) -> tuple[Any, Any]:
    """(inputs, targets): numbers as one array (N, columns), unless `columns` names them; targets unchanged.

    Raises: DataError that names an input column without numbers.
    """
    record = {str(name): frame[name] for name in frame.columns}
    given, targets = split(record, columns)
    names = columns.inputs or [name for name, one in record.items() if one is given or one is not targets]
    found = {name: _numbers(name, record[name]) for name in names}
    if columns.inputs:
        inputs: Any = found if len(found) > 1 else found[names[0]]
    else:
        inputs = np.stack(list(found.values()), 1)
    return inputs, inputs if targets is given else _array(targets)


def matrix_of(frame: Any) -> np.ndarray:
    """All columns as one array (N, columns). Raises: DataError that names one without numbers."""
    return np.stack([_numbers(str(name), frame[name]) for name in frame.columns], 1)


def _array(column: Any) -> np.ndarray:
    return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)


def _numbers(name: str, column: Any) -> np.ndarray:
    array = _array(column)
    if array.dtype.kind == "O":
        array = np.array(array.tolist())
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"column {name!r} has values of dtype {array.dtype}, such as {array[0]!s:.60}; expected numbers. "
            "HINT: leave the column out, fill it (df.fillna), or number its values: "
            f"df[{name!r}].astype('category').cat.codes."
        )
    return array
