"""The four phases of a training step, pure and per replica: forward, (loss,) backward, update.

Written once: `core/step.py` fuses them into one program, `distributed/ddp.py` runs them one at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.losses import PerExample
from cyxjax.core.mesh import AXIS
from cyxjax.core.model.batch_stats import batch_scope
from cyxjax.core.model.model_fns import ModelFns, Sown
from cyxjax.core.replica import psum
from cyxjax.core.rows import Weighed, weighed
from cyxjax.errors import DataError

PyTree = Any


def forward(
    fns: ModelFns,
    params: PyTree,
    model_state: PyTree,
    inputs: PyTree,
    weight: jax.Array | None,
    key: jax.Array,
    stats_axis: str | None = None,
) -> tuple[PyTree, Callable, PyTree]:
    """(output, pullback, new model state) of one micro-batch in training mode.

    The pullback is a pytree: it may leave `jit`, so the facade needs no second forward.
    """

    def apply(p: PyTree) -> tuple[PyTree, PyTree]:
        with batch_scope(weight, stats_axis):
            return fns.apply(p, model_state, inputs, key, True)

    return jax.vjp(apply, params, has_aux=True)


def loss_and_seed(
    loss: PerExample, output: PyTree, target: PyTree, weight: jax.Array, scale: jax.Array
) -> tuple[Weighed, PyTree]:
    """(losses of the rows, gradient of `scale * sum(weight * losses)` with respect to output).

    A loss that weighs samples itself does so in both; `mean_of_weighed` then makes the sum a mean.
    """

    def objective(y: PyTree) -> tuple[jax.Array, Weighed]:
        scored, own = y if isinstance(y, Sown) else (y, None)
        losses = _added(weighed(loss, scored, target, weight), own)
        weights = weight if losses.weights is None else losses.weights
        # `where` keeps what a padding row produced (it may be Inf or NaN) out of the sum.
        return jnp.where(weights > 0, losses.values, 0.0) @ (weights * scale), losses

    _, pullback, losses = jax.vjp(objective, output, has_aux=True)
    return losses, pullback(jnp.ones((), jnp.float32))[0]


def _added(losses: Weighed | None, own: jax.Array | None) -> Weighed:
    """Losses, and what the model itself adds to each."""
    assert losses is not None
    if own is None:
        return losses
    if losses.weights is not None:
        raise DataError(
            "the model sows losses, one a sample, and the trainer's loss weighs its samples: two means. "
            "HINT: return both from the model, and write one loss that gives (values, weights) of their sum."
        )
    return Weighed(losses.values + own, None)


def backward(pullback: Callable, output_grad: PyTree) -> PyTree:
    """LOCAL gradients with respect to params: nothing is averaged yet.

    Of complex parameters the conjugate of what jax gives, which is uphill (as torch's); optimizers go down.
    """
    uphill = lambda g: jnp.conj(g) if jnp.issubdtype(g.dtype, jnp.complexfloating) else g  # noqa: E731
    return jax.tree.map(uphill, pullback(output_grad)[0])


def sum_of_weights(losses: Weighed) -> jax.Array | None:
    """What the rows weigh in the loss, float32 (); None where each weighs what its sample does."""
    return None if losses.weights is None else losses.weights.sum()


def mean_of_weighed(grads: PyTree, weights: jax.Array | None, total: jax.Array) -> PyTree:
    """Gradients of a loss's sum divided by `total` samples, as those of its weighted mean.

    weights: what this replica's samples weigh in the loss (`sum_of_weights`); summed over replicas here. A
    step in which nothing weighs anything has no gradient.
    """
    if weights is None:
        return grads
    whole = psum(weights)
    factor = jnp.where(whole > 0, total / whole, 0.0)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


def mean_model_state(model_state: PyTree, weight: jax.Array) -> PyTree:
    """Running statistics averaged over replicas, each by its number of samples; inside `sync_map`.

    Leaves that are not floats (counters) take the largest value. A replica without samples counts nothing.
    """
    if not jax.tree.leaves(model_state):
        return model_state
    total = psum(weight)
    add = lambda leaf: psum(leaf) if _is_float(leaf) else lax.pmax(leaf, AXIS)  # noqa: E731
    return divided_state(jax.tree.map(add, weighted_state(model_state, weight)), total, model_state)


def weighted_state(model_state: PyTree, weight: jax.Array) -> PyTree:
    """A share of the mean: floats times `weight`, the samples they come from, which may be none."""

    def share(leaf: jax.Array) -> jax.Array:
        if not _is_float(leaf):
            return leaf
        return jnp.where(weight > 0, leaf * weight.astype(leaf.dtype), jnp.zeros_like(leaf))

    return jax.tree.map(share, model_state)


def divided_state(summed: PyTree, total: Any, like: PyTree) -> PyTree:
    """The mean of shares that were added up, in the dtypes of `like`; counters as they are."""
    mean = lambda leaf, old: (leaf / total if _is_float(leaf) else leaf).astype(old.dtype)  # noqa: E731
    return jax.tree.map(mean, summed, like)


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
