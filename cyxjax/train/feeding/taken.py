"""Whether the model and the loss take samples of a form, looked at before a step is made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.loss_calls import refuse_other_arguments
from cyxjax.core.objective.loss_probe import needs_probe, refuse_unless_blind, refuse_unless_mean
from cyxjax.core.objective.metric_probe import refuse_unless_of_samples
from cyxjax.core.objective.own_loss import refuse_a_tree
from cyxjax.core.objective.untraced import compiled
from cyxjax.core.trees import batch_shapes, described, kind_of
from cyxjax.errors import CyxjaxError, DataError

PyTree = Any
Sample = tuple[PyTree, PyTree]
_ROWS = 16  # as many tell enough
_LONGEST = 160  # of what another library says


@dataclass(frozen=True)
class Taker:
    """Model, loss and metrics together.

    run: shapes of inputs -> shapes of the model's outputs, for one sample a replica. probed: the kinds of
    targets whose loss was shown to be a mean over samples, which costs more than shapes do.
    """

    run: Callable[[PyTree], PyTree]
    loss: Callable[[PyTree, PyTree], Any]
    metrics: Metrics
    replicas: int
    batch_size: int
    known: PyTree  # inputs that the model was made for, shape (1, ...)
    probed: set[Any] = field(default_factory=set)

    def look(
        self, sample: Sample, what: str, more: Callable[[], Sample] | None = None, *, learns: bool = False
    ) -> Sample:
        """(outputs, targets) as shapes of one sample a replica, of some (inputs, targets).

        what: names the samples. more: gives unlike ones, where `sample` may be too few to show what a loss
        makes of them. learns: whether it is to have a gradient.
        Raises: DataError for samples that the model or the loss does not take; ConfigError for a loss or a
            metric that is no mean over samples.
        """
        inputs, targets = sample
        both = self._output(inputs, what), batch_shapes(targets, self.replicas)
        kind = jax.tree.structure(both), *((a.ndim, a.dtype.kind) for a in jax.tree.leaves(both))
        refuse_a_tree(self.loss, both[0])
        if learns:
            refuse_other_arguments(self.loss, both[0])
        if learns or kind not in self.probed:
            asked = needs_probe(self.loss) or self.metrics.own
            some = more()[1] if more and asked else targets
            output, few = both[0], jax.tree.map(lambda a: a[:_ROWS], some)
            refuse_unless_mean(self.loss, output, few, self.batch_size, learns=learns)
            refuse_unless_blind(self.loss, output, few)
            refuse_unless_of_samples(self.metrics.own, output, few)
        self._score(*both, what)
        self.probed.add(kind)
        return both

    def look_again(self, inputs: PyTree, targets: PyTree, what: str) -> None:
        """As `look`, of samples that are not trained on."""
        self.look((inputs, targets), what)

    def _output(self, inputs: PyTree, what: str) -> PyTree:
        if described(inputs) == described(self.known):
            return self.run(batch_shapes(inputs, self.replicas))
        try:
            return self.run(batch_shapes(inputs, self.replicas))
        except Exception as err:  # whatever a model raises, ours too
            raise DataError(
                f"{what}: the samples are {described(inputs)}, and the model was made for "
                f"{described(self.known)}: it does not take them ({_short(err)}). "
                "HINT: prepare all samples alike."
            ) from err

    def _score(self, output: PyTree, target: PyTree, what: str) -> None:
        try:
            with compiled("the loss"):
                jax.eval_shape(self.loss, output, target)
        except CyxjaxError:
            raise
        except (TypeError, ValueError) as err:
            given = [", ".join(kind_of(leaf) for leaf in jax.tree.leaves(tree)) for tree in (output, target)]
            raise DataError(
                f"{what}: the loss does not take the model's output, {given[0]}, with the target, "
                f"{given[1]}: {_short(err)} HINT: {_way_out(output, target)}."
            ) from err


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
