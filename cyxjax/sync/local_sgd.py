"""Replicas that step on their own gradients for some steps: local SGD and DiLoCo.

Local SGD then averages their parameters; DiLoCo takes one outer step of momentum SGD on how far replicas
moved on average.
"""

from collections.abc import Callable
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


class DilocoState(NamedTuple):
    num_steps: Any  # int32 (): local steps since the start
    inner: PyTree  # the optimizer's state, a row per replica
    anchor: PyTree  # the parameters from which all replicas started the round
    outer: PyTree  # the outer optimizer's state


def in_rounds(
    optimizer: optax.GradientTransformation, every: int, init: Callable, end_round: Callable, state_spec: Any
) -> Sync:
    """Steps on local gradients, and `end_round` after every `every` steps. Evaluation sees the mean of the
    replicas' parameters.

    init: params -> the first state, whose fields begin with those of LocalSgdState. end_round: (params, the
    state's other fields) -> new ones. Raises: ConfigError for `every` below 1.
    """
    if every < 1:
        raise ConfigError(
            f"every={every}: expected a number of local steps, 1 or more. HINT: every=8.", key="comm_options"
        )

    def update(grads: PyTree, state: Any, params: PyTree) -> tuple[PyTree, Any]:
        num_steps = state.num_steps + 1
        updates, inner = optimizer.update(grads, state.inner, params)
        params = optax.apply_updates(params, updates)
        params, *others = lax.cond(num_steps % every == 0, end_round, lambda *same: same, params, *state[2:])
        return params, state._make([num_steps, inner, *others])

    return Sync(init, update, state_spec, PER_REPLICA, consensus=pmean)


def local_sgd(optimizer: optax.GradientTransformation, every: int = 8) -> Sync:
    """Steps on local gradients; after every `every` steps replicas take the mean of their parameters.

    Each keeps its own optimizer state. `every=1` with plain SGD is `mean`. Clipping by norm sees the local
    gradient: between averages there is no other. Evaluation sees the mean of the replicas' parameters.
    Source: Stich 2019, arXiv:1805.09767. Raises: ConfigError for `every` below 1.
    """

    def init(params: PyTree) -> LocalSgdState:
        return LocalSgdState(jnp.int32(0), optimizer.init(params))

    def end_round(params: PyTree) -> tuple[PyTree]:
        return (as_own(pmean(params)),)

    return in_rounds(optimizer, every, init, end_round, LocalSgdState(REPLICATED, PER_REPLICA))


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
    outer_sgd = optax.sgd(outer_lr, outer_momentum or None, nesterov=bool(outer_momentum))

    def init(params: PyTree) -> DilocoState:
        return DilocoState(jnp.int32(0), optimizer.init(params), params, outer_sgd.init(params))

    def end_round(params: PyTree, anchor: PyTree, outer: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        moved = pmean(jax.tree.map(jnp.subtract, anchor, params))  # exactly 0 for what did not move
        updates, outer = outer_sgd.update(moved, outer, anchor)
        anchor = optax.apply_updates(anchor, updates)
        return as_own(anchor), anchor, outer

    spec = DilocoState(REPLICATED, PER_REPLICA, REPLICATED, REPLICATED)
    return in_rounds(optimizer, every, init, end_round, spec)


def as_own(params: PyTree) -> PyTree:
    """Replicated params as each replica's own copy, which may then differ between replicas."""
    # The branches of a `cond` must give values of one type.
    return params if lax.axis_size(AXIS) == 1 else lax.pcast(params, AXIS, to="varying")


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
