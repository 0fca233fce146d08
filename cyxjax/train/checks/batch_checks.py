"""Checks by shapes that samples, model, loss and metrics fit together; nothing is compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.losses import BCEWithLogitsLoss
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.forms import check_samples_first, compiled
from cyxjax.core.objective.global_loss import of_one_device
from cyxjax.core.objective.split_check import split_check
from cyxjax.core.objective.task import takes_labels
from cyxjax.core.objective.terms import shares_of
from cyxjax.core.rows import whole_batch
from cyxjax.core.trees import batch_shapes, described, kind_of
from cyxjax.data.labels import Watch, check_labels, watched
from cyxjax.data.sources import ArrayDataset, Dataset
from cyxjax.errors import CyxjaxError, DataError
from cyxjax.train.feeding.fit_data import FitData, unsplit

PyTree = Any
Sample = tuple[PyTree, PyTree]
_LONGEST = 160  # of what another library says


@dataclass(frozen=True)
class BatchChecks:
    """Model, loss and metrics, to be called with shapes of samples.

    run: shapes of inputs -> shapes of the model's outputs, for one sample a replica. batch_size: what the
    loss is called with. is_whole: whether a step has the whole batch at once, on one replica.
    """

    run: Callable[[PyTree], PyTree]
    loss: Callable[[PyTree, PyTree], Any]
    metrics: Metrics
    replicas: int
    batch_size: int
    is_whole: bool
    known: PyTree  # inputs that the model was made for, shape (1, ...)

    def shapes_of(self, sample: Sample, what: str) -> Sample:
        """(outputs, targets) as shapes of a batch, of some (inputs, targets).

        what: names the samples. Nothing is computed.
        Raises: DataError for samples that the model or the loss does not take; ConfigError for a loss or a
            metric that cannot be called on one sample where a step has a part of the batch.
        """
        inputs, targets = sample
        output = batch_shapes(self._output(inputs, what), self.batch_size)
        target = batch_shapes(targets, self.batch_size)
        self._score(output, target, what)
        return output, target

    def check_again(self, inputs: PyTree, targets: PyTree, what: str) -> None:
        """As `shapes_of`, for samples that are not trained on."""
        self.shapes_of((inputs, targets), what)

    def _output(self, inputs: PyTree, what: str) -> PyTree:
        if described(inputs) == described(self.known):
            output = self.run(batch_shapes(inputs, self.replicas))
            check_samples_first(output, 1, self.replicas)
            return output
        try:
            return self.run(batch_shapes(inputs, self.replicas))
        except Exception as err:  # whatever a model raises, ours too
            raise DataError(
                f"{what}: the samples are {described(inputs)}, and the model was made for "
                f"{described(self.known)}: it does not take them ({_short(err)}). "
                "HINT: prepare all samples alike."
            ) from err

    def _score(self, output: PyTree, target: PyTree, what: str) -> None:
        def score(output: PyTree, target: PyTree, weight: jax.Array) -> PyTree:
            return shares_of(of_one_device(self.loss), output, target, weight)

        weight = jax.ShapeDtypeStruct((self.batch_size,), jnp.float32)
        try:
            with compiled("the loss"), whole_batch(self.is_whole):
                jax.eval_shape(score, output, target, weight)
        except CyxjaxError:
            raise
        except (TypeError, ValueError) as err:
            given = [", ".join(kind_of(leaf) for leaf in jax.tree.leaves(tree)) for tree in (output, target)]
            raise DataError(
                f"{what}: the loss does not take the model's output, {given[0]}, with the target, "
                f"{given[1]}: {_short(err)} HINT: {_way_out(output, target)}."
            ) from err
        self.metrics.check_merges()
        with whole_batch(self.is_whole):
            jax.eval_shape(partial(self.metrics.sums, None), output, target, weight)
        check = split_check(self.loss, self.metrics)
        if check.measures and not self.is_whole:
            jax.eval_shape(check.rows, output, target)


def check_tuple(fns: ModelFns, inputs: PyTree) -> None:
    """Returns for a tuple that the model takes; `inputs` are one sample's, (1, ...).

    Raises: DataError for (x, y, weight), whose first two are inputs, as of a model that has two.
    """
    key = jax.random.key(0)
    try:
        first = jax.eval_shape(fns.init, key, inputs)
        jax.eval_shape(lambda p, s, x: fns.apply(p, s, x, key, False), *first, inputs)
    except (CyxjaxError, NameError):  # NameError: of an axis, which is not here
        return
    except Exception as err:  # whatever a model raises
        raise DataError(
            f"of a sample of {len(inputs) + 1} the last is the target and the others are inputs, "
            f"{described(inputs)}, which the model does not take ({_short(err)}). HINT: weights go with the "
            "target: (x, {'y': y, 'w': w}) and a loss of pairs, lambda out, t: (loss(out, t['y']), t['w'])."
        ) from err


def _short(err: Exception) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())[:_LONGEST]}"


def _way_out(output: PyTree, target: PyTree) -> str:
    column = getattr(target, "shape", ())[1:] == (1,) and jnp.issubdtype(target.dtype, jnp.integer)
    if column and getattr(output, "ndim", 0) == 2:
        return "labels (N, 1) are y[:, 0]"
    return "call it as loss(output, target) on arrays of these shapes"


def watched_samples(data: FitData, checks: BatchChecks) -> Any:
    """The samples of `data`, to be evaluated, whose labels all name a class where the loss takes labels.

    Raises: DataError naming the sample; of a loader as its batches are read.
    """
    found = watched(data.train)
    one = data.train.take(np.zeros(1, np.int64)) if data.indexed else data.first[0]
    _watch(found, checks.shapes_of(one, "data"), checks, "data")
    return found


def _watch(data: Any, looked: tuple[PyTree, PyTree], checks: BatchChecks, what: str) -> None:
    """All samples are looked at as the first ones were; integer targets are class labels for a classification
    loss of ours alone. Raises: DataError naming a label of no class.
    """
    if takes_labels(checks.loss):
        check_labels(data, *checks.metrics.labels(*looked), what, checks.metrics.ignore_index)
    if isinstance(data, Watch):
        data.what, data.takes = what, checks.check_again


def check_batches(data: FitData, checks: BatchChecks) -> None:
    """The loss, and shapes and labels of indexed data, before anything is compiled or written.

    Raises: DataError that names the data, the sample and what does not fit; ConfigError as `shapes_of`.
    """
    parts = {"training data": data, "validation data": None if data.val is None else _to_validate(data.val)}
    form: PyTree = None
    looked: tuple[PyTree, PyTree] = None, None
    for what, part in parts.items():
        if part is not None:
            one = part.train.take(np.zeros(1, np.int64)) if part.indexed else part.first[0]
            before, form = form, batch_shapes(one, 1)
            looked = looked if form == before else checks.shapes_of(one, what)
            _check_shares(part.train, checks.loss, what)
            _watch(part.train, looked, checks, what)


def _to_validate(val: Any) -> FitData:
    """Validation data; of a loader with its first batch."""
    try:
        return unsplit(val)
    except DataError as err:
        raise DataError(f"validation data: {err}") from err


def _check_shares(dataset: Dataset, loss: Any, what: str) -> None:
    """Checks that in-memory targets of BCEWithLogitsLoss lie in [0, 1].

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
