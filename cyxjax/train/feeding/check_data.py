"""Whether samples, model, loss and metrics fit together: looked at before anything is compiled or written."""

from itertools import islice
from typing import Any

import jax
import numpy as np

from cyxjax.core.losses import BCEWithLogitsLoss
from cyxjax.core.objective.task import takes_labels
from cyxjax.core.trees import batch_shapes
from cyxjax.data.labels import Watch, check_labels, watched
from cyxjax.data.sources import ArrayDataset, Dataset, as_batches
from cyxjax.errors import DataError
from cyxjax.train.feeding.fit_data import FitData, is_loader
from cyxjax.train.feeding.taken import Taker

PyTree = Any


def first_step(data: FitData, accumulation: int = 1) -> FitData:
    """`data` with the batches of a loader's first step, read once for all who want to look at them.

    Raises: DataError for an empty loader.
    """
    if data.indexed:
        return data
    held = getattr(data.train, "peek", None)  # of what is read once
    given = data.train if held is None else held(accumulation)
    batches = (jax.tree.map(np.array, batch) for batch in as_batches(given))  # it may fill them again
    first = tuple(islice(batches, accumulation))
    if not first:
        raise DataError("the loader is empty. HINT: check the dataset and drop_last.")
    return data._replace(first=first)


def one_input(data: Any) -> PyTree:
    """One sample's inputs of a FitData, Dataset or loader, shape (1, ...), to learn shapes from."""
    if not isinstance(data, FitData):
        data = first_step(FitData(data, None, not is_loader(data)))
    if data.indexed:
        return data.train.take(np.zeros(1, np.int64))[0]
    return jax.tree.map(lambda a: a[:1], data.first[0][0])


def labelled(data: FitData, taker: Taker) -> Any:
    """The samples of `data`, to be evaluated, whose labels all name a class where the loss takes labels.

    Raises: DataError naming the sample; of a loader as its batches are read.
    """
    found = watched(data.train)
    one = data.train.take(np.zeros(1, np.int64)) if data.indexed else data.first[0]
    _watch(found, taker.look(one, "data"), taker, "data")
    return found


def _watch(data: Any, looked: tuple[PyTree, PyTree], taker: Taker, what: str) -> None:
    """All samples are looked at as the first ones were; integer targets are class labels for a classification
    loss of ours alone. Raises: DataError naming a label of no class.
    """
    if takes_labels(taker.loss):
        check_labels(data, *taker.metrics.labels(*looked), what, taker.metrics.ignore_index)
    if isinstance(data, Watch):
        data.what, data.takes = what, taker.look_again


def check(data: FitData, taker: Taker) -> None:
    """The loss, and shapes and labels of indexed data, before anything is compiled or written.

    Raises: DataError that names the data, the sample and what does not fit; ConfigError as `Taker.look`.
    """
    parts = {"training data": data, "validation data": None if data.val is None else _to_validate(data.val)}
    form: PyTree = None
    looked: tuple[PyTree, PyTree] = None, None
    for what, part in parts.items():
        if part is not None:
            one = part.train.take(np.zeros(1, np.int64)) if part.indexed else part.first[0]
            before, form = form, batch_shapes(one, 1)
            looked = looked if form == before else taker.look(one, what)
            check_shares(part.train, taker.loss, what)
            _watch(part.train, looked, taker, what)


def _to_validate(val: Any) -> FitData:
    """Of a loader its first batch, read beforehand."""
    try:
        return first_step(FitData(val, None, not is_loader(val)))
    except DataError as err:
        raise DataError(f"validation data: {err}") from err


def check_shares(dataset: Dataset, loss: Any, what: str) -> None:
    """In-memory targets of a binary cross-entropy of ours lie in [0, 1]: outside, it is no loss of anything.

    Raises: DataError naming the first sample whose do not.
    """
    if not isinstance(dataset, ArrayDataset) or not isinstance(
        getattr(loss, "__self__", None), BCEWithLogitsLoss
    ):
        return
    for leaf in jax.tree.leaves(dataset.targets):
        if type(leaf) is not np.ndarray or leaf.dtype.kind not in "iuf":
            continue  # memmaps are not read through
        if leaf.size and (leaf.min() < 0 or leaf.max() > 1):
            at = tuple(np.argwhere((leaf < 0) | (leaf > 1))[0])
            raise DataError(
                f"{what}: sample {at[0]} has target {leaf[at]}, and BCEWithLogitsLoss takes 0, 1 "
                "or a share between. HINT: for -1 and 1 give (y + 1) / 2; for classes cx.CrossEntropyLoss()."
            )
