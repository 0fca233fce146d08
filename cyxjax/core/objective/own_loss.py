"""Whether the loss that a model computes itself is one of each sample: asked before training."""

from typing import Any

import jax
import numpy as np

from cyxjax.core.losses import Loss, PerExample, UserLoss, model_loss
from cyxjax.core.mesh import REPLICATED, build_mesh
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.terms import terms_of
from cyxjax.core.replica import model_map
from cyxjax.core.rows import by_sample
from cyxjax.errors import ConfigError

PyTree = Any

_WIDE = 0.03  # half precision rounds by less
_ONE_EACH = "HINT: return {'loss': one value a sample}, shape (B,), that depends on this sample alone."


def is_the_models_own(loss: PerExample) -> bool:
    """Whether `loss` only reads what the model computed."""
    return isinstance(loss, UserLoss) and loss.fn is model_loss


def refuse_a_tree(loss: Any, output: PyTree) -> None:
    """Raises ConfigError where a loss of ours, which takes one array, is given a model's dict or tuple.

    loss: one, or a sum of terms.
    """
    for ours in (getattr(term.loss, "__self__", None) for term in terms_of(loss)):
        if not isinstance(ours, Loss) or hasattr(output, "shape"):
            continue
        raise ConfigError(
            f"the model returns a {type(output).__name__}, and {type(ours).__name__} takes one array. HINT: "
            "loss=None (in a file `loss: model`) for a model's own loss, or a function (output, target) that "
            "picks."
        )


def refuse_coupled_loss(fns: ModelFns, inputs: PyTree) -> None:
    """Returns for a model whose loss of a sample, in evaluation, does not depend on the rest of its batch.

    inputs: some samples', (n, ...). The first is taken among them and among copies of itself, with parameters
    drawn for this. A model that does not take them is left to the step, which says why.
    Raises: ConfigError for another loss; DataError for a model that returns none.
    """
    count, key = len(jax.tree.leaves(inputs)[0]), jax.random.key(0)
    if count < 2:
        return
    params, model_state = fns.init(key, jax.tree.map(lambda a: a[:1], inputs))

    def losses(params: PyTree, model_state: PyTree, inputs: PyTree) -> PyTree:
        return model_loss(fns.apply(params, model_state, inputs, key, False)[0], None)

    on_axis = model_map(losses, build_mesh(jax.local_devices()[:1]), (REPLICATED,) * 3, REPLICATED)
    try:
        form = jax.eval_shape(on_axis, params, model_state, inputs)
    except (TypeError, ValueError):  # what models raise for shapes
        return
    if any(not one.ndim or len(one) != count for one in jax.tree.leaves(form)):
        shapes = [one.shape for one in jax.tree.leaves(form)]
        raise ConfigError(f"the model's own loss of {count} samples has shape {shapes[0]}. {_ONE_EACH}")
    run, copies = jax.jit(on_axis), jax.tree.map(lambda a: np.repeat(a[:1], count, 0), inputs)
    among_others, among_copies = (_first(run(params, model_state, batch)) for batch in (inputs, copies))
    if not np.isclose(among_others, among_copies, rtol=_WIDE, atol=1e-6, equal_nan=True):
        raise ConfigError(
            f"the model's own loss of a sample is {among_others:.4g} in one batch and {among_copies:.4g} in "
            "another: it depends on the other samples, so also on padding and the number of replicas. "
            f"{_ONE_EACH}"
        )


def _first(losses: PyTree) -> float:
    """The first sample's loss, of values or of (values, weights)."""
    each = losses if isinstance(losses, tuple) else (losses, None)
    value = each[0] if each[1] is None else by_sample(*each)[0]
    return float(np.asarray(value, np.float64).reshape(len(value), -1).mean(1)[0])
