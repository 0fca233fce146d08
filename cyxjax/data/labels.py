"""Checks that integer labels name an output of the model.

Arrays are checked before training, data that is read item by item while it is read. Labels out of range would
give wrong results without an error.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from cyxjax.data.sources import ArrayDataset, Dataset, Subset, as_batches
from cyxjax.errors import DataError


def _ignore(targets: Any, where: str = "", ids: np.ndarray | None = None) -> None:
    """The check of labels until `check_labels` sets the range."""


class WatchedDataset:
    """A dataset whose labels are checked as they are read."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.look: Callable[..., None] = _ignore

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Like `take` of the dataset. Raises: DataError for a label that names no output."""
        inputs, targets = self.dataset.take(indices)
        self.look(targets, ids=indices)
        return inputs, targets


class WatchedLoader:
    """A loader whose labels are checked as batches are read.

    Its other attributes (`set_epoch`, `sampler`, `batch_size`) are the loader's own.
    """

    def __init__(self, loader: Any):
        self.loader = loader
        self.look: Callable[..., None] = _ignore

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "take"):  # tf.data has a `take` that is not a Dataset's
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self.watch(self.loader)

    def watch(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each batch. Raises: DataError for a label that names no output."""
        for number, (inputs, targets) in enumerate(as_batches(batches)):
            self.look(targets, f": batch {number}")
            yield inputs, targets


def watched(data: Any) -> Any:
    """`data`, watched if it is a loader or a dataset that is read item by item; arrays unchanged."""
    if isinstance(data, WatchedDataset | WatchedLoader):
        return data
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        return WatchedLoader(data)
    return WatchedDataset(data) if isinstance(data, Dataset) and _targets(data) is None else data


def check_labels(
    dataset: Any, output: Any, target: Any, what: str = "labels", ignore_index: int | None = None
) -> None:
    """Checks that integer labels name one of the model's outputs, except for `ignore_index`.

    output, target: a model's output for one sample and a sample's target, as ShapeDtypeStructs (1, ..., C)
    and (1, ...); labels have one dimension less than the output.
    Raises: DataError that names the first wrong label and its sample; for a watched dataset while it is read.
    """
    if not hasattr(output, "shape") or not hasattr(target, "shape"):
        return
    if np.dtype(target.dtype).kind not in "iu" or len(target.shape) != len(output.shape) - 1:
        return
    look = partial(_refuse, num_classes=output.shape[-1], what=what, ignore_index=ignore_index)
    if isinstance(dataset, WatchedDataset | WatchedLoader):
        dataset.look = look
    elif isinstance(labels := _targets(dataset), np.ndarray):
        look(labels)


def _targets(dataset: Any) -> Any:
    """The targets of arrays, in memory or mapped, or of a subset; None for data that is read by item."""
    if isinstance(dataset, Subset):
        targets = _targets(dataset.dataset)
        return targets[dataset.rows] if isinstance(targets, np.ndarray) else targets
    return dataset.targets if isinstance(dataset, ArrayDataset) else None


def _refuse(
    targets: Any,
    where: str = "",
    ids: np.ndarray | None = None,
    *,
    num_classes: int,
    what: str,
    ignore_index: int | None,
) -> None:
    """Raises: DataError for a label that names no output."""
    labels = np.asarray(targets)
    if not labels.size or (labels.min() >= 0 and labels.max() < num_classes):
        return
    invalid = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if not invalid.any():
        return
    place = np.argwhere(invalid)[0]
    sample, label = place[0] if ids is None else ids[place[0]], labels[tuple(place)]
    hint = "give the model one output per class, counted from 0"
    if label < 0:
        hint = f"if it marks no class, CrossEntropyLoss(ignore_index={label}) leaves it out"
    raise DataError(
        f"{what}{where}: sample {sample} has label {label}, but the model has {num_classes} outputs "
        f"(labels 0 to {num_classes - 1}). HINT: {hint}."
    )
