"""Checks that integer labels name an output of the model.

Arrays are checked before training, other data while they are read. Labels out of range would give wrong
results without an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cyxjax.data.sources import ArrayDataset, Subset
from cyxjax.errors import DataError

Check = Callable[..., None]
"""(targets of some samples, where="", ids=None) -> raises DataError for a label that names no output."""


def unchecked(targets: Any, where: str = "", ids: np.ndarray | None = None) -> None:
    """Checks nothing: targets that are no labels, and those of data whose labels are known to be right."""


class LabelCheck:
    """A `Check` for data that is read by item or by batch; it checks nothing before `expect`."""

    def __init__(self) -> None:
        self._check: Check = unchecked

    def expect(
        self,
        dataset: Any,
        find: Callable[[Any], Any],
        num_classes: int,
        what: str,
        ignore_index: int | None,
    ) -> None:
        """Checks the labels of arrays now, and those of other data when they are read.

        find: the labels among the targets. num_classes: a label is below it, or is `ignore_index`.
        Raises: DataError that names the first wrong label and its sample.
        """
        rows = None
        while isinstance(dataset, Subset):
            rows = dataset.rows if rows is None else dataset.rows[rows]
            dataset = dataset.dataset
        refuse = partial(_refuse, num_classes=num_classes, what=what, ignore_index=ignore_index)
        labels = find(dataset.targets) if isinstance(dataset, ArrayDataset) else None
        if isinstance(labels, np.ndarray):  # in memory or mapped
            refuse(labels if rows is None else labels[rows], ids=rows)
        else:
            self._check = lambda targets, where="", ids=None: refuse(
                find(targets), where, ids if rows is None else rows[ids]
            )

    def __call__(self, targets: Any, where: str = "", ids: np.ndarray | None = None) -> None:
        """where: of the data the targets are. ids: of their samples; None: counted from 0.

        Raises: DataError that names the first wrong label and its sample.
        """
        self._check(targets, where, ids)


def _refuse(
    labels: Any,
    where: str = "",
    ids: np.ndarray | None = None,
    *,
    num_classes: int,
    what: str,
    ignore_index: int | None,
) -> None:
    """Raises: DataError for a label that names no output."""
    labels = np.asarray(labels)
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
