"""Converts arrays, memmaps, tuples, dicts, frames, tables and item datasets to a `Dataset`.

Arrays are gathered in one indexing call; datasets read item by item are read by a pool of threads.
Nothing here imports torch, datasets or jax: objects are recognised by what they can do.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cyxjax.data.columns import Columns, is_frame, leaves, map_leaves, of_frame, split
from cyxjax.data.items import ItemDataset, refuse_batches, refuse_strings
from cyxjax.errors import DataError

LARGE_BYTES = 4 << 20
"""A batch from which on threads pay, and reading ahead: one thread copies 128 images of 224x224x3, 77 MB, in
20 ms, half of it for fresh pages, while an H100 takes 26 ms for a step of ResNet-50 on them."""
_MOST_THREADS = 8  # memory is not faster by more


def gathered_rows(leaf: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """`leaf[indices]`; by `take`, twice as fast, where that does not copy the whole array first."""
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
    # A pool for each batch: its start costs 0.3 ms, and no thread is left behind. "clip": nothing is out of
    # range, and numpy then writes straight into `out`.
    with ThreadPoolExecutor(threads, "cyxjax-gather") as pool:
        list(pool.map(lambda part: array.take(part[1], axis=0, out=part[0], mode="clip"), parts))
    return made


@runtime_checkable
class Dataset(Protocol):
    """Samples that can be read by index, many at a time."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices` (int64, repeats allowed), one row each, in that order."""
        ...


@dataclass(frozen=True)
class ArrayDataset:
    """`inputs` and `targets` as arrays (or tuples or dicts of arrays) of one length; memmaps stay on disk."""

    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        _check_rows([*self._leaves()], "a dataset")

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
        """Rows `indices` of the input and target columns. Raises: DataError where they are no numbers."""
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


def as_dataset(
    data: Any,
    *,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    num_workers: int = 0,
) -> Dataset:
    """`data` as a Dataset.

    Takes: an array; a tuple (inputs, targets); a dict of arrays; a torch TensorDataset or Dataset; a Hugging
    Face dataset; a data frame; anything with `__len__` and `__getitem__`; or a Dataset, returned as it is.
    `inputs` and `targets` name columns where there are names. `num_workers` threads read item by item.

    Raises: DataError for unequal lengths, no samples, or a type that none of these describe.
    """
    columns = Columns(
        tuple(inputs) if inputs is not None and not isinstance(inputs, str) else inputs, targets
    )
    dataset = _recognise(data, columns, num_workers)
    if len(dataset) == 0:
        raise DataError("an empty dataset: 0 samples. HINT: check the path or filter it came from.")
    return dataset


def _recognise(data: Any, columns: Columns, num_workers: int) -> Dataset:
    if isinstance(data, str) or getattr(data, "__len__", None) is None:
        raise _no_dataset(data)
    if is_array(data):
        data = (data,)
    elif isinstance(getattr(data, "tensors", None), tuple):  # torch's TensorDataset
        data = data.tensors
    elif is_frame(data):
        return ArrayDataset(*_arrays(of_frame(data, columns)))
    if type(data) is tuple and len(data) > 2 and all(type(one) is tuple for one in data):
        refuse_batches(list(data), columns)  # as inputs and targets each would be a pair of arrays
    if isinstance(data, tuple | Mapping):
        return ArrayDataset(*_arrays(split(data, columns)))
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        return TableDataset(data.with_format("numpy"), columns)
    if isinstance(data, Dataset):
        return data
    if isinstance(data, list):
        refuse_batches(data, columns)
    if not hasattr(data, "__getitem__"):
        raise _no_dataset(data)
    return ItemDataset(data, num_workers, columns)


_BY_SUFFIX = {"": "image_folder", ".npy": "npy", ".npz": "npz", ".parquet": "parquet"}


def _no_dataset(data: Any) -> DataError:
    hint = "pass (inputs, targets) as numpy arrays"
    if isinstance(data, str | PathLike):
        loader = _BY_SUFFIX.get(Path(data).suffix, "csv")
        hint = f"data = cx.load_dataset({loader!r}, {str(data)!r}), then fit(data.train, data.val)"
    elif hasattr(data, "collect"):
        hint = "give data.collect()"
    elif isinstance(data, Iterable):
        hint = "pass it through as_batches()"
    return DataError(
        f"{type(data).__name__} is not a dataset; expected arrays, a tuple or dict of arrays, or an object "
        f"with __len__ and __getitem__. HINT: {hint}."
    )


def as_batches(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(inputs, targets) of every batch of a torch DataLoader or any iterable of batches, as numpy arrays.

    Tensors are converted by the numpy protocol, without a copy where their memory allows it. A list is read
    as a tuple, because torch's default collation makes lists.
    Raises: DataError for a batch whose arrays do not hold one row a sample each, or that holds none.
    """
    for number, batch in enumerate(batches):
        pair = _arrays(split(tuple(batch) if isinstance(batch, list) else batch))
        _check_rows(
            [*leaves(pair[0], "inputs"), *leaves(pair[1], "targets")], f"batch {number} of the loader"
        )
        yield pair


def _check_rows(found: list[tuple[str, Any]], what: str) -> None:
    """Raises: DataError unless there are arrays (by name), each with one row a sample, of at least one."""
    rows = {name: len(leaf) if np.ndim(leaf) else "one number" for name, leaf in found}
    if len(set(rows.values())) > 1 or "one number" in rows.values():
        said = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise DataError(
            f"{what} with arrays of unequal length: {said}. HINT: give every sample one row in each array; "
            "single samples, one after another, are cx.data.Rows(stream)."
        )
    if not rows or 0 in rows.values():
        kind = "0 samples" if rows else "no array: it is None"
        raise DataError(f"{what} with {kind}. HINT: check where it comes from; leave an empty batch out.")


def _arrays(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """(inputs, targets) as numpy arrays; one object where they were one."""
    inputs = map_leaves(_as_array, pair[0])
    return inputs, inputs if pair[1] is pair[0] else map_leaves(_as_array, pair[1])


def is_array(data: Any) -> bool:
    """Whether `data` is one array; a table of columns is none."""
    return hasattr(data, "__array__") and hasattr(data, "shape") and hasattr(data, "dtype")


_NO_ARRAYS = {
    "toarray": "a sparse matrix becomes an array by .toarray()",
    "column_names": "give the data sets of a dict apart, fit(data['train'], data['validation'])",
}


def _as_array(leaf: Any) -> Any:
    """A numpy array over `leaf`'s own memory where possible; memmaps are left as they are."""
    if hasattr(leaf, "detach"):  # a torch tensor, perhaps on a device and part of a graph
        leaf = leaf.detach().cpu()
    for made_of, hint in _NO_ARRAYS.items():
        if hasattr(leaf, made_of):
            raise DataError(f"found a {type(leaf).__name__}; expected an array of numbers. HINT: {hint}.")
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(
            "a masked array, whose mask would be lost. HINT: fill it (x.filled(0)); a mask goes into weights."
        )
    if array.dtype.kind == "O":  # numbers, or rows of them of one length, that were kept as objects
        plain = np.array(array.tolist())
        array = plain if plain.dtype.kind in "biufc" else array
    refuse_strings(array)
    if array.dtype.kind in "OMmV":
        odd = next((one for one in array.flat if not isinstance(one, int | float | np.number)), None)
        raise DataError(
            f"found values of dtype {array.dtype}, such as a {type(odd).__name__}; expected an array of "
            "numbers. HINT: np.asarray(values, np.float32)."
        )
    return array
