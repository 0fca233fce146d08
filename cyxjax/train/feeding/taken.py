"""Whether the model and the loss take samples of a form, looked at before a step is made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.forms import check_samples_first, compiled
from cyxjax.core.objective.global_loss import of_one_device
from cyxjax.core.objective.split_check import split_check
from cyxjax.core.objective.terms import shares_of
from cyxjax.core.rows import whole_batch
from cyxjax.core.trees import batch_shapes, described, kind_of
from cyxjax.errors import CyxjaxError, DataError

PyTree = Any
Sample = tuple[PyTree, PyTree]
_LONGEST = 160  # of what another library says


@dataclass(frozen=True)
class Taker:
    """Model, loss and metrics together.

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

    def look(self, sample: Sample, what: str) -> Sample:
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

    def look_again(self, inputs: PyTree, targets: PyTree, what: str) -> None:
        """As `look`, of samples that are not trained on."""
        self.look((inputs, targets), what)

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


def refuse_untaken_tuple(fns: ModelFns, inputs: PyTree) -> None:
    """Returns for inputs that are no tuple, or that the model takes; `inputs` are one sample's, (1, ...).

    Raises: DataError for (x, y, weight), whose first two are inputs, as of a model that has two.
    """
    if type(inputs) is not tuple:
        return
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
