"""Replicas that step on their own gradients for some steps: local SGD and DiLoCo.

Local SGD then averages their parameters; DiLoCo takes one outer step of momentum SGD on how far replicas
moved on average.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED
from cyxjax.core.replica import pmean
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError
from cyxjax.sync.entry import Exchange, Strategy


class LocalSgdState(NamedTuple):
    num_steps: Any  # int32 (): local steps since the start
    inner: PyTree  # the optimizer's state, a row per replica


def local_sgd(optimizer: optax.GradientTransformation, every: int = 8) -> Sync:
    """Steps on local gradients; after every `every` steps replicas take the mean of their parameters.

    Each keeps its own optimizer state. `every=1` with plain SGD is `mean`. Clipping by norm sees the local
    gradient: between averages there is no other. Evaluation sees the mean of the replicas' parameters.
    Source: Stich 2019, arXiv:1805.09767. Raises: ConfigError for `every` below 1.
    """
    check_every(every)

    def init(params: PyTree) -> LocalSgdState:
        return LocalSgdState(jnp.int32(0), optimizer.init(params))

    def update(grads: PyTree, state: LocalSgdState, params: PyTree) -> tuple[PyTree, LocalSgdState]:
        num_steps = state.num_steps + 1
        params, inner = local_step(optimizer, grads, state.inner, params)
        params = lax.cond(num_steps % every == 0, lambda p: as_own(pmean(p)), lambda p: p, params)
        return params, LocalSgdState(num_steps, inner)

    spec = LocalSgdState(REPLICATED, PER_REPLICA)
    return Sync(init, update, spec, PER_REPLICA, consensus=pmean)


def check_every(every: int) -> None:
    """Raises: ConfigError unless `every` is a number of steps."""
    if every < 1:
        raise ConfigError(
            f"every={every}: expected a number of local steps, 1 or more. HINT: every=8.", key="comm_options"
        )


def local_step(
    optimizer: optax.GradientTransformation, grads: PyTree, inner: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """(params, optimizer state) after a step on this replica's gradients alone."""
    updates, inner = optimizer.update(grads, inner, params)
    return optax.apply_updates(params, updates), inner


def as_own(params: PyTree) -> PyTree:
    """Replicated params as each replica's own copy, which may then differ between replicas."""
    # The branches of a `cond` must give values of one type.
    return params if lax.axis_size(AXIS) == 1 else lax.pcast(params, AXIS, to="varying")


class DilocoState(NamedTuple):
    num_steps: Any  # int32 (): local steps since the start
    inner: PyTree  # the optimizer's state, a row per replica
    anchor: PyTree  # the parameters from which all replicas started the round
    outer: PyTree  # the outer optimizer's state


def diloco(
    optimizer: optax.GradientTransformation,
    every: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> Sync:
    """Local steps; after every `every` of them an outer Nesterov step on the mean of (start - end).

    `every=1` with outer_lr=1, outer_momentum=0 and plain SGD inside is `mean`. Clipping by norm sees the
    local gradient. Evaluation sees the mean of the replicas' parameters.
    Source: Douillard et al. 2023, arXiv:2311.08105. Raises: ConfigError for `every` below 1.
    """
    check_every(every)
    outer_sgd = optax.sgd(outer_lr, outer_momentum or None, nesterov=bool(outer_momentum))

    def init(params: PyTree) -> DilocoState:
        return DilocoState(jnp.int32(0), optimizer.init(params), params, outer_sgd.init(params))

    def end_round(params: PyTree, anchor: PyTree, outer: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        moved = pmean(jax.tree.map(jnp.subtract, anchor, params))  # exactly 0 for what did not move
        updates, outer = outer_sgd.update(moved, outer, anchor)
        anchor = optax.apply_updates(anchor, updates)
        return as_own(anchor), anchor, outer

    def update(grads: PyTree, state: DilocoState, params: PyTree) -> tuple[PyTree, DilocoState]:
        num_steps = state.num_steps + 1
        params, inner = local_step(optimizer, grads, state.inner, params)
        params, anchor, outer = lax.cond(
            num_steps % every == 0, end_round, lambda *same: same, params, state.anchor, state.outer
        )
        return params, DilocoState(num_steps, inner, anchor, outer)

    spec = DilocoState(REPLICATED, PER_REPLICA, REPLICATED, REPLICATED)
    return Sync(init, update, spec, PER_REPLICA, consensus=pmean)


ENTRIES = {
    "local_sgd": Strategy(
        local_sgd,
        (
            "parameters once in `every` steps",
            "an optimizer on each replica",
            "slow networks, tolerant models",
        ),
        sends=lambda params, size: [Exchange(True, size, 1 / 8)],
        averages_every_step=False,
        lossless={"every": 1},
        usual={"every": 3},
        learns={"every": 4},
    ),
    "diloco": Strategy(
        diloco,
        (
            "the same, `every` 50, with an outer Nesterov step",
            "the start of the round, the outer momentum",
            "the slowest networks",
        ),
        sends=lambda params, size: [Exchange(True, size, 1 / 50)],
        averages_every_step=False,
        lossless={"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        usual={"every": 2},
        learns={"every": 8, "outer_momentum": 0.5},
    ),
}
