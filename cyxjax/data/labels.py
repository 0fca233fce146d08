"""Checks that the integer labels of arrays name an output of the model, before training.

Labels that are read by sample or by batch are not checked: the loss of one that names no output is NaN.
"""

from typing import Any

import numpy as np

from cyxjax.data.sources import ArrayDataset, Subset
from cyxjax.errors import DataError


def check_labels(
    dataset: Any, output: Any, target: Any, what: str = "labels", ignore_index: int | None = None
) -> None:
    """Whole-number labels of arrays must name one of the model's outputs, but for `ignore_index`.

    output, target: a model's output for one sample and a sample's target, as ShapeDtypeStructs (1, ..., C)
    and (1, ...); labels have a dimension less than the output.
    Raises: DataError naming the first label that does not, and its sample.
    """
    if not hasattr(output, "shape") or not hasattr(target, "shape"):
        return
    if np.dtype(target.dtype).kind not in "iu" or len(target.shape) != len(output.shape) - 1:
        return
    labels, num_classes = _targets(dataset), output.shape[-1]
    if not isinstance(labels, np.ndarray) or (labels.min() >= 0 and labels.max() < num_classes):
        return
    odd = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if not odd.any():
        return
    place = tuple(np.argwhere(odd)[0])
    label = labels[place]
    hint = "give the model one output per class, counted from 0"
    if label < 0:
        hint = f"if it stands for no class, CrossEntropyLoss(ignore_index={label}) leaves it out"
    raise DataError(
        f"{what}: sample {place[0]} has label {label}, but the model has {num_classes} outputs "
        f"(labels 0 to {num_classes - 1}). HINT: {hint}."
    )


def _targets(dataset: Any) -> Any:
    """The targets of arrays, in memory or mapped, or of a part of them; None for what is read by item."""
    if isinstance(dataset, Subset):
        targets = _targets(dataset.dataset)
        return targets[dataset.rows] if isinstance(targets, np.ndarray) else targets
    return dataset.targets if isinstance(dataset, ArrayDataset) else None
