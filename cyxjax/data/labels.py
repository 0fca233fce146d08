"""Checks that integer labels name an output of the model.

Arrays are checked before training, data read item by item as they are read. Other labels would train to wrong
numbers without an error.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cyxjax.data.sources import ArrayDataset, Dataset, Subset, as_batches
from cyxjax.errors import DataError


class Watch:
    """What is looked at in samples as they are read: labels, after `check_labels`."""

    def __init__(self) -> None:
        self.num_classes: int | None = None
        self.what = ""
        self.ignore_index: int | None = None

    def _looked(self, targets: Any, where: str, ids: np.ndarray | None = None) -> None:
        """Raises: DataError for a label that names no output."""
        if self.num_classes is not None:
            _refuse(np.asarray(targets), self.num_classes, f"{self.what}{where}", self.ignore_index, ids)


class WatchedDataset(Watch):
    """A dataset whose samples are looked at as they are read."""

    def __init__(self, dataset: Dataset):
        super().__init__()
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """As of the dataset. Raises: DataError for a label that names no output."""
        inputs, targets = self.dataset.take(indices)
        self._looked(targets, "", indices)
        return inputs, targets


class WatchedLoader(Watch):
    """A loader whose batches are looked at as they come.

    Its other attributes (`set_epoch`, `sampler`, `batch_size`) are the loader's own.
    """

    def __init__(self, loader: Any):
        super().__init__()
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "take"):  # tf.data has a `take` which is no Dataset's
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self.watch(self.loader)

    def watch(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each batch. Raises: DataError for a label that names no output."""
        for number, (inputs, targets) in enumerate(as_batches(batches)):
            self._looked(targets, f": batch {number}")
            yield inputs, targets


def watched(data: Any) -> Any:
    """`data`, watched where it is a loader or a dataset that is read item by item; arrays as they are."""
    if isinstance(data, WatchedDataset | WatchedLoader):
        return data
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        return WatchedLoader(data)
    return WatchedDataset(data) if isinstance(data, Dataset) and _targets(data) is None else data


def check_labels(
    dataset: Any, output: Any, target: Any, what: str = "labels", ignore_index: int | None = None
) -> None:
    """Whole-number labels must name one of the model's outputs, but for `ignore_index`.

    output, target: a model's output for one sample and a sample's target, as ShapeDtypeStructs (1, ..., C)
    and (1, ...); labels have a dimension less than the output.
    Raises: DataError naming the first label that does not, and its sample; for a watched dataset later.
    """
    if not hasattr(output, "shape") or not hasattr(target, "shape"):
        return
    if np.dtype(target.dtype).kind not in "iu" or len(target.shape) != len(output.shape) - 1:
        return
    if isinstance(dataset, WatchedDataset | WatchedLoader):
        dataset.num_classes, dataset.what, dataset.ignore_index = output.shape[-1], what, ignore_index
        return
    labels = _targets(dataset)
    if isinstance(labels, np.ndarray):
        _refuse(labels, output.shape[-1], what, ignore_index)


def _targets(dataset: Any) -> Any:
    """The targets of arrays, in memory or mapped, or of a part of them; None for what is read by item."""
    if isinstance(dataset, Subset):
        targets = _targets(dataset.dataset)
        return targets[dataset.rows] if isinstance(targets, np.ndarray) else targets
    return dataset.targets if isinstance(dataset, ArrayDataset) else None


def _refuse(
    labels: np.ndarray, num_classes: int, what: str, ignore_index: int | None, ids: np.ndarray | None = None
) -> None:
    if not labels.size or (labels.min() >= 0 and labels.max() < num_classes):
        return
    odd = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if not odd.any():
        return
    where = np.argwhere(odd)[0]
    sample, label = where[0] if ids is None else ids[where[0]], labels[tuple(where)]
    hint = "give the model one output per class, counted from 0"
    if label < 0:
        hint = f"if it stands for no class, CrossEntropyLoss(ignore_index={label}) leaves it out"
    raise DataError(
        f"{what}: sample {sample} has label {label}, but the model has {num_classes} outputs "
        f"(labels 0 to {num_classes - 1}). HINT: {hint}."
    )
