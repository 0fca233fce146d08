"""Converts arrays, memmaps, tuples, dicts, frames, tables and item datasets to a `Dataset`.

Arrays are gathered in one indexing call; datasets read item by item are read by a pool of threads.
Imports neither torch, datasets nor jax: objects are recognised by their attributes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cyxjax.data import hugging_face
from cyxjax.data.columns import (
    Columns,
    as_array,
    collated,
    is_frame,
    leaves,
    map_leaves,
    of_frame,
    own_arrays,
    refuse_batches,
    split,
    stack_rows,
)
from cyxjax.errors import ConfigError, DataError

LARGE_BYTES = 4 << 20
"""Bytes of a batch from which threads and reading ahead pay off: one thread copies 128 images of 224x224x3,
77 MB, in 20 ms, half of it for new memory pages, and a step of ResNet-50 on them takes an H100 26 ms."""
_MOST_THREADS = 8  # more threads do not make memory faster
_GOLDEN = (5**0.5 - 1) / 2  # golden ratio: any part of a mixture has the right shares to within a few samples


def gathered_rows(leaf: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """`leaf[indices]`, by `take` if that does not copy the whole array first: it is twice as fast."""
    if not (leaf.flags.c_contiguous and leaf.flags.aligned and leaf.dtype.isnative):
        return leaf[indices]
    array = np.asarray(leaf)
    is_large = array[:1].nbytes * len(indices) >= LARGE_BYTES
    return _by_threads(array, indices) if is_large else array.take(indices, axis=0)


def _by_threads(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    if not (-len(array) <= indices.min() and indices.max() < len(array)):
        raise IndexError(f"rows {indices.min()} to {indices.max()} of an array of {len(array)}")
    made = np.empty((len(indices), *array.shape[1:]), array.dtype)
    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    parts = zip(np.array_split(made, threads), np.array_split(indices % len(array), threads), strict=True)
    # A pool for each batch costs 0.3 ms and leaves no threads behind. "clip": nothing is out of range, and
    # numpy then writes directly into `out`.
    with ThreadPoolExecutor(threads, "cyxjax-gather") as pool:
        list(pool.map(lambda part: array.take(part[1], axis=0, out=part[0], mode="clip"), parts))
    return made


@runtime_checkable
class Dataset(Protocol):
    """Samples that can be read by index, many at a time."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices` (int64, repeats allowed), one row per index, in order."""
        ...


@dataclass(frozen=True)
class ArrayDataset:
    """`inputs` and `targets` as arrays (or tuples or dicts of arrays) of one length; memmaps stay on disk."""

    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        _check_rows([*self._leaves()], "the dataset", "check the path, slice or filter that it came from")

    def __len__(self) -> int:
        return len(next(self._leaves())[1])

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Rows `indices`, copied; inputs that are also the targets are read once."""
        inputs = map_leaves(lambda leaf: gathered_rows(leaf, indices), self.inputs)
        if self.targets is self.inputs:
            return inputs, inputs
        return inputs, map_leaves(lambda leaf: gathered_rows(leaf, indices), self.targets)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one sample, targets included."""
        return sum(leaf.nbytes // len(leaf) for _, leaf in self._leaves())

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        yield from leaves(self.inputs, "inputs")
        yield from leaves(self.targets, "targets")


@dataclass(frozen=True)
class TableDataset:
    """A Hugging Face dataset, read as numpy columns."""

    table: Any
    columns: Columns

    def __len__(self) -> int:
        return len(self.table)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Rows `indices` of the input and target columns. Raises: DataError if they are not numeric."""
        return _arrays(split(self.table[indices.tolist()], self.columns))


@dataclass(frozen=True)
class Subset:
    """The samples `rows` of a dataset, without copying it."""

    dataset: Dataset
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices`, counted within the subset."""
        return self.dataset.take(self.rows[indices])


class ItemDataset:
    """A `Dataset` over anything with `__len__` and `__getitem__`, such as a torch Dataset.

    `num_workers` threads read the items of a batch; 0 reads in the calling thread. Threads, not processes:
    decoding libraries and file reads release the interpreter lock, and nothing is copied between processes.
    """

    def __init__(self, source: Any, num_workers: int = 0, columns: Columns | None = None) -> None:
        self._source, self._columns = source, columns or Columns()
        self._pool = ThreadPoolExecutor(num_workers, "cyxjax-data") if num_workers > 0 else None

    def __len__(self) -> int:
        return len(self._source)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices`, stacked along a new first dimension.

        Raises: DataError that names the index of an item that raised, or for items of different structure.
        """
        wanted = [int(i) for i in indices]
        each: Any = map if self._pool is None else self._pool.map
        return stack_rows(list(each(self._item, wanted)), self._columns, wanted)

    def close(self) -> None:
        """Ends the worker threads; the dataset then reads in the calling thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

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


class Mixture:
    """A `Dataset` of `num_samples` samples (default: the sum of all lengths), a share of `weights` from each.

    Sample i is always the same: its dataset is a function of i, and the samples of a dataset are taken in
    order, starting over at its end. So a mixture is resumed, audited and shuffled like any dataset.
    Raises: ConfigError unless there is a positive weight for each dataset.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], num_samples: int | None = None):
        self._parts: list[Dataset] = [as_dataset(one) for one in datasets]
        shares = np.asarray(weights, np.float64)
        if len(shares) != len(self._parts) or not (shares > 0).all():
            raise ConfigError(
                f"{len(self._parts)} datasets, weights {list(weights)}: expected a positive one for each. "
                "HINT: Mixture([a, b], [3, 1])."
            )
        self._length = sum(map(len, self._parts)) if num_samples is None else num_samples
        edges = np.cumsum(shares / shares.sum())[:-1]
        which = np.searchsorted(edges, np.arange(self._length) * _GOLDEN % 1.0, side="right")
        self._which = which.astype(np.int16)
        self._turn = np.empty(self._length, np.int64)
        for number, part in enumerate(self._parts):
            mine = np.flatnonzero(which == number)
            self._turn[mine] = np.arange(len(mine)) % len(part)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices`."""
        which, places, rows = self._which[indices], [], []
        for number in np.unique(which):
            mine = np.flatnonzero(which == number)
            places.append(mine)
            rows.append(self._parts[number].take(self._turn[np.asarray(indices)[mine]]))
        back = np.argsort(np.concatenate(places))
        return map_leaves(lambda *leaves: np.concatenate(leaves)[back], *rows)


def as_dataset(
    data: Any,
    *,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    num_workers: int = 0,
) -> Dataset:
    """`data` as a Dataset.

    Takes: an array; a tuple (inputs, targets); a dict of arrays; a torch TensorDataset or Dataset; a Hugging
    Face dataset; a data frame; anything with `__len__` and `__getitem__`; or a Dataset, returned unchanged.
    `inputs` and `targets` select columns by name, if there are names. `num_workers` threads read item by
    item.

    Raises: DataError for unequal lengths, no samples, or any other type.
    """
    dataset = _recognise(data, Columns.of(inputs, targets), num_workers)
    if len(dataset) == 0:
        raise DataError("the dataset is empty: 0 samples. HINT: check the path or filter that it came from.")
    return dataset


def _recognise(data: Any, columns: Columns, num_workers: int) -> Dataset:
    if is_array(data):
        data = (data,)
    elif isinstance(getattr(data, "tensors", None), tuple):  # torch's TensorDataset
        data = data.tensors
    elif is_frame(data):
        return ArrayDataset(*_arrays(of_frame(data, columns)))
    if isinstance(data, tuple | Mapping):
        return ArrayDataset(*_arrays(split(data, columns)))
    has_length = getattr(data, "__len__", None) is not None and not isinstance(data, str)
    if has_length and hasattr(data, "column_names") and hasattr(data, "with_format"):
        return TableDataset(hugging_face.in_numpy(data), columns)
    if has_length and isinstance(data, Dataset):
        return data
    if not has_length or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{type(data).__name__} is not a dataset; expected arrays, a tuple or dict of arrays, or an "
            "object with __len__ and __getitem__. HINT: pass (inputs, targets) as numpy arrays, batches "
            "through cx.data.Batches, files through cx.load_dataset."
        )
    if isinstance(data, list):
        refuse_batches(data, columns)
    return ItemDataset(data, num_workers, columns)


def as_batches(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(inputs, targets) of every batch of a torch DataLoader or any iterable of batches, as numpy arrays.

    A batch that is a list is read as a tuple, and so are lists of tensors in it, as torch's collation makes.
    Raises: DataError for a batch whose arrays do not have one row per sample each, or that is empty.
    """
    for number, batch in enumerate(batches):
        pair = _arrays(split(collated(tuple(batch) if isinstance(batch, list) else batch)))
        _check_rows(
            [*leaves(pair[0], "inputs"), *leaves(pair[1], "targets")],
            f"batch {number} of the loader",
            "leave out an empty batch; for a stream of single samples use cx.data.Rows(stream)",
        )
        yield pair


def _check_rows(found: list[tuple[str, Any]], what: str, hint: str) -> None:
    """Raises: DataError unless there are arrays (by name), each with one row per sample, and not empty."""
    rows = {name: f"{len(leaf)} samples" if np.ndim(leaf) else "one number" for name, leaf in found}
    if len(set(rows.values())) != 1 or not set(rows.values()).isdisjoint(("0 samples", "one number")):
        counts = ", ".join(f"{name} has {count}" for name, count in rows.items()) or "it is None"
        raise DataError(
            f"{what} needs equally many rows in each array, one per sample, and at least one: {counts}. "
            f"HINT: {hint}."
        )


def _arrays(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """(inputs, targets) as numpy arrays; one object if both are the same object."""
    inputs = map_leaves(as_array, pair[0])
    return inputs, inputs if pair[1] is pair[0] else map_leaves(as_array, pair[1])


def has_items(data: Any) -> bool:
    """Whether `data` has a length and gives items by index; a stream may have one of the two."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def is_array(data: Any) -> bool:
    """Whether `data` is one array; a table of columns is not."""
    return hasattr(data, "__array__") and hasattr(data, "shape") and hasattr(data, "dtype")
