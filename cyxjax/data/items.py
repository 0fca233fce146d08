"""Datasets read item by item (`__getitem__`): read in threads, stacked into arrays."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cyxjax.data.columns import Columns, leaves, map_leaves, split
from cyxjax.errors import DataError


class ItemDataset:
    """A `Dataset` over anything with `__len__` and `__getitem__`, such as a torch Dataset.

    `num_workers` threads read the items of a batch; 0 reads in the calling thread. Threads, not processes:
    decoding libraries and file reads release the interpreter lock, and nothing is copied between processes.
    """

    def __init__(self, source: Any, num_workers: int = 0, columns: Columns | None = None) -> None:
        self._source = source
        self._columns = columns or Columns()
        self._pool = ThreadPoolExecutor(num_workers, "cyxjax-data") if num_workers > 0 else None
        # torch's batched fetch: one call for many items, where the source has one.
        self._get_many = getattr(source, "__getitems__", None)

    def __len__(self) -> int:
        return len(self._source)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices`, stacked along a new first dimension.

        Raises: DataError that names the index of an item that raised or does not stack with the others.
        """
        wanted = [int(i) for i in indices]
        return stack_rows(self._read(wanted), wanted, self._columns)

    def close(self) -> None:
        """Ends the worker threads; the dataset then reads in the calling thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _read(self, indices: list[int]) -> Sequence[Any]:
        if self._get_many is not None:
            return self._get_many(indices)
        if self._pool is None:
            return [self._item(i) for i in indices]
        return list(self._pool.map(self._item, indices))

    def _item(self, index: int) -> Any:
        try:
            return own_arrays(self._source[index])
        except DataError as error:
            raise DataError(f"item {index} of {type(self._source).__name__}: {error}") from error
        except Exception as error:
            raise DataError(
                f"item {index} of {type(self._source).__name__} raised {type(error).__name__}: {error}. "
                f"HINT: read dataset[{index}] on its own to see it."
            ) from error


_HOLDS_ARRAYS = np.ndarray | dict | list | tuple


def own_arrays(item: Any) -> Any:
    """`item` with copies of its arrays: a source may read the next sample into the same buffer."""
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, dict):
        return {name: own_arrays(part) for name, part in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(own_arrays, item))
    if type(item) is tuple or (type(item) is list and any(isinstance(one, _HOLDS_ARRAYS) for one in item)):
        return type(item)(map(own_arrays, item))
    return item


def stack_rows(rows: Sequence[Any], indices: Sequence[int], columns: Columns) -> tuple[Any, Any]:
    """(inputs, targets) of samples, stacked along a new first dimension; one object where they are one.

    indices: of the samples, for the message. Raises: DataError naming a sample unlike the first.
    """
    pairs = [split(row, columns) for row in rows]
    inputs = stack([x for x, _ in pairs], indices)
    same = all(y is x for x, y in pairs)
    return inputs, inputs if same else stack([y for _, y in pairs], indices)


def refuse_strings(array: np.ndarray) -> None:
    """Raises: DataError where a value is a string, with the line that makes integer labels of strings."""
    if array.dtype.kind not in "OUST":
        return
    found = next((one for one in array.flat if isinstance(one, str | bytes)), None)
    if found is not None:
        raise DataError(
            f"found strings, such as {found!r}; expected numbers, and integers as labels. "
            "HINT: class_names, y = np.unique(y, return_inverse=True)."
        )


def refuse_batches(items: list[Any], columns: Columns) -> None:
    """Returns for a list of samples. Raises: DataError for one that looks like batches, a target a row."""
    if not items or not isinstance(items[0], tuple | Mapping):
        return
    inputs, targets = split(items[0], columns)
    rows = {tuple(np.shape(leaf)[:1]) for _, leaf in leaves(inputs)}
    wide = [tuple(np.shape(leaf)) for _, leaf in leaves(inputs) if np.ndim(leaf) > 1]
    shape = () if targets is inputs or isinstance(targets, tuple | Mapping) else tuple(np.shape(targets))
    of_rows = len(shape) == 1 or (len(shape) == 2 and all(shape != one[:2] for one in wide))  # else a mask
    if wide and of_rows and rows == {shape[:1]} and shape[0] > 1:
        raise DataError(
            f"a list of {len(items)} whose first has inputs of shape {wide[0]} and a target of shape {shape}:"
            f" batches, or samples of {shape[0]} targets? HINT: fit(cx.data.Batches(data)) for batches; "
            "of samples give the arrays, fit(np.stack(inputs), np.stack(targets))."
        )


def stack(items: list[Any], indices: Sequence[int]) -> Any:
    """Items (arrays, numbers, tuples or dicts of them) stacked leaf by leaf along a new first dimension."""
    try:
        whole = map_leaves(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *items)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        hint = (
            "return a tuple (input, target)" if isinstance(items[0], list) else "return arrays of one shape"
        )
        raise DataError(f"{_odd_one(items, indices)}. HINT: {hint}, or pad them.") from error
    for _, leaf in leaves(whole):
        refuse_strings(leaf)
    return whole


def _odd_one(items: list[Any], indices: Sequence[int]) -> str:
    first = _describe(items[0])
    for item, index in zip(items, indices, strict=True):
        if _describe(item) != first:
            return f"item {index} is {_describe(item)}; item {indices[0]} is {first}"
    return f"items like {first} cannot be stacked"


def _describe(item: Any) -> str:
    if isinstance(item, dict | tuple):
        return str(map_leaves(lambda leaf: np.shape(leaf), item))
    if isinstance(item, list):
        return f"list of {len(item)}"
    return f"{type(item).__name__} of shape {np.shape(item)}"
