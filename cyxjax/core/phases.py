"""The phases of a training step, pure and per replica: forward, loss, backward, update.

`core/step.py` fuses them into one program, `distributed/ddp.py` runs them one at a time.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.mesh import AXIS
from cyxjax.core.model.batch_stats import OWN, StatsAxes, batch_scope
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.terms import Shares, flat_shares, reached, routes_of, shares_of
from cyxjax.core.replica import psum
from cyxjax.core.rows import Weighed
from cyxjax.core.trees import PyTree, times, widened


def forward(
    fns: ModelFns,
    params: PyTree,
    model_state: PyTree,
    inputs: PyTree,
    weight: jax.Array | None,
    key: jax.Array,
    stats: StatsAxes = OWN,
) -> tuple[PyTree, Callable, PyTree]:
    """(output, pullback, new model state) of one micro-batch in training mode.

    The pullback is a pytree: it may leave `jit`, so hand-written loops need no second forward pass.
    """

    def apply(p: PyTree) -> tuple[PyTree, PyTree]:
        with batch_scope(weight, stats):
            return fns.apply(p, model_state, inputs, key, True)

    return jax.vjp(apply, params, has_aux=True)


class Pulled(NamedTuple):
    """LOCAL gradients of one mean with respect to the parameters it trains, and its sum of weights."""

    grads: PyTree  # None for parameters that it does not train
    weights: jax.Array | None  # float32 (); None: the weights of the samples


def pull_back(
    loss: Any,
    output: PyTree,
    pullback: Callable,
    target: PyTree,
    weight: jax.Array,
    scale: jax.Array,
) -> tuple[list[Weighed], list[Pulled]]:
    """(losses of the rows, LOCAL gradients of `scale * sum(weight * losses)`), one of each per mean.

    All go back through the same forward pass; most losses are one mean. `means_of` combines the gradients
    into one tree.
    """
    shares, seed = _share_and_seed(loss, 0, 0, output, target, weight, scale)
    routes, pulled = routes_of(loss), []
    for r, (route, found) in enumerate(zip(routes, shares, strict=True)):
        for n, share in enumerate(found):
            if r or n:
                seed = _share_and_seed(loss, r, n, output, target, weight, scale)[1]
            mine = reached(backward(pullback, seed), route, routes)
            pulled.append(Pulled(mine, None if share.weights is None else share.weights.sum()))
    return flat_shares(shares), pulled


def _share_and_seed(
    loss: Any, route: int, number: int, output: PyTree, target: PyTree, weight: jax.Array, scale: jax.Array
) -> tuple[Shares, PyTree]:
    """(all shares of the loss, gradient of one of them with respect to output)."""

    def objective(y: PyTree) -> tuple[jax.Array, Shares]:
        shares = shares_of(loss, y, target, weight)
        losses = shares[route][number]
        weights = weight if losses.weights is None else losses.weights
        # `where` keeps the loss of a padding row (it may be Inf or NaN) out of the sum.
        return jnp.where(weights != 0, losses.values, 0.0) @ (weights * scale), shares

    _, pullback, shares = jax.vjp(objective, output, has_aux=True)
    return shares, pullback(jnp.ones((), jnp.float32))[0]


def backward(pullback: Callable, output_grad: PyTree) -> PyTree:
    """LOCAL gradients with respect to params: nothing is averaged yet.

    For complex parameters, the conjugate of jax's gradient, which points uphill as in torch.
    """
    uphill = lambda g: jnp.conj(g) if jnp.issubdtype(g.dtype, jnp.complexfloating) else g  # noqa: E731
    return jax.tree.map(uphill, pullback(output_grad)[0])


def means_of(pulled: list[Pulled], total: jax.Array) -> PyTree:
    """The sum of the gradients of all means, from gradients of sums divided by `total` samples.

    A loss with weights of its own is divided by the sum of these weights over replicas. A step in which all
    of them are 0 gives no gradient of this loss.
    """
    means = []
    for grads, weights in pulled:
        if weights is not None:
            whole = psum(weights)
            factor = jnp.where(whole != 0, total / whole, 0.0)
            grads = times(factor, grads)
        means.append(grads)
    return jax.tree.map(_sum_of_those_there, *means, is_leaf=lambda leaf: leaf is None)


def _sum_of_those_there(*leaves: jax.Array | None) -> jax.Array | None:
    """The sum of the leaves that are not None; None if all are: parameters may contain None."""
    there = [leaf for leaf in leaves if leaf is not None]
    return reduce(operator.add, there) if there else None


class StateShare(NamedTuple):
    """A share of the mean model state, or a sum of shares."""

    sums: PyTree  # floats times their number of samples, 16-bit ones as float32; counters as they are
    changed: jax.Array | None  # float32 (number of leaves,): on how many replicas with samples it changed


def mean_model_state(model_state: PyTree, old: PyTree, weight: jax.Array) -> PyTree:
    """Running statistics averaged over replicas, weighted by the number of samples; inside `sync_map`.

    Counters and other leaves that are neither float nor complex take the largest value. A replica without
    samples has zero weight. old: the state before the step, equal on all replicas.
    """
    if not jax.tree.leaves(model_state):
        return model_state
    if lax.axis_size(AXIS) == 1:
        return jax.tree.map(lambda new, was: new.astype(was.dtype), model_state, old)
    total = psum(weight)
    add = lambda leaf: psum(leaf) if _is_inexact(leaf) else lax.pmax(leaf, AXIS)  # noqa: E731
    return divided_state(jax.tree.map(add, weighted_state(model_state, old, weight)), total, old)


def weighted_state(model_state: PyTree, old: PyTree, weight: jax.Array) -> StateShare:
    """A share of the mean: floats times `weight`, their number of samples, which may be 0."""

    def share(leaf: jax.Array) -> jax.Array:
        if not _is_inexact(leaf):
            return leaf
        wide = widened(leaf)
        return jnp.where(weight > 0, wide * weight.astype(wide.dtype), jnp.zeros_like(wide))

    def changed(leaf: jax.Array, was: jax.Array) -> jax.Array:
        return ((weight > 0) & (leaf.astype(was.dtype) != was).any()).astype(jnp.float32)

    each = jax.tree.leaves(jax.tree.map(changed, model_state, old))
    return StateShare(jax.tree.map(share, model_state), jnp.stack(each) if each else None)


def divided_state(summed: StateShare, total: Any, old: PyTree) -> PyTree:
    """The mean from the sum of shares, in the dtypes of `old`; counters as they are.

    A leaf that no replica changed is the old one: a constant times weights would be rounded, or overflow.
    """

    def mean(leaf: jax.Array, changed: jax.Array, was: Any) -> jax.Array:
        if not _is_inexact(leaf):
            return leaf.astype(was.dtype)
        by = jnp.asarray(total, leaf.dtype) if jnp.iscomplexobj(leaf) else total
        return jnp.where(changed > 0, (leaf / by).astype(was.dtype), was)

    each = () if summed.changed is None else tuple(summed.changed)
    return jax.tree.map(mean, summed.sums, jax.tree.unflatten(jax.tree.structure(old), each), old)


def _is_inexact(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
