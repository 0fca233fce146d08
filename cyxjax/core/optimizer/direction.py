"""Whether an optimizer goes down: asked before training, of a few updates with gradients that are made up.

An update of optax's is *added* to the parameters. The minus sign comes with the learning rate: a part of a
rule alone (`optax.scale_by_adam()`), or a rule whose rate is None (`optax.adadelta()`), climbs; and what the
mask of `optax.masked` leaves out is given the gradient itself. Both train, and say nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cyxjax.core.objective.host import on_host
from cyxjax.core.objective.step_value import step_value, with_value
from cyxjax.core.trees import leaf_names
from cyxjax.errors import ConfigError

PyTree = Any
_STEPS = 8  # SAM climbs for a step on purpose; Rprop, ADOPT, a warm-up and MultiSteps begin with no update
_FEW = 10_000_000  # numbers: what a host asks for in a moment
_WAY = (
    "HINT: optax.chain(optimizer, optax.scale_by_learning_rate(0.001)) has the minus sign, once; to climb on "
    "purpose give the loss a minus."
)


def refuse_set_rate(optimizer: Any) -> None:
    """Raises: ConfigError for one of optax's own that `lr` was set on: it has its rate inside."""
    if type(optimizer).__module__.startswith("optax") and "lr" in getattr(optimizer, "__dict__", ()):
        raise ConfigError(
            f"lr={optimizer.lr!r} was set on a transformation of optax, which keeps the rate it has. "
            "HINT: cx.AdamOptimizer(0.001), whose lr can be set; or a schedule in place of the number."
        )


class _Asked(NamedTuple):
    """What two runs from one state got, with gradients g and -g: numbers a leaf, in the order of leaves."""

    climbed: list[float]  # <sum of the updates' difference, g>: below 0 where the leaf goes down
    is_raw: list[bool]  # the first update was the gradient itself


def refuse_uphill(optimizer: optax.GradientTransformation, params: PyTree, *, alone: bool = True) -> str:
    """ "" for a rule that goes down, or stands still; a line to tell where it moves some parameters up.

    params: shapes of the real tree; arrays of its structure, with two numbers along a dimension, stand in.
    What counts is the response to the gradient's sign: no decay, noise or momentum. A rule that takes no such
    arrays is left alone. alone: nothing else moves the parameters; of several one may climb on purpose.
    Raises: ConfigError for one that climbs, or that hands on the gradients of some parameters as they came.
    """
    try:
        with on_host(), step_value(jnp.ones(2)):
            asked = _asked(with_value(optimizer), _small(params))
            # A mask by size takes what stands in otherwise than the leaf.
            if (
                max(asked.climbed, default=0.0) > 0
                and sum(np.prod(one.shape) for one in jax.tree.leaves(params)) < _FEW
            ):
                asked = _asked(with_value(optimizer), params)
    except Exception:  # whatever a rule raises that was made for the real shapes
        return ""
    names = leaf_names(params)
    up = [name for name, one in zip(names, asked.climbed, strict=True) if one > 0]
    raw = [name for name, is_raw in zip(names, asked.is_raw, strict=True) if is_raw and name in up]
    if not up:
        return ""
    if not any(one < 0 for one in asked.climbed):
        if not alone:
            return f"One of the optimizers moves what it trains up the gradient. {_WAY}"
        raise ConfigError(
            "the optimizer adds to the parameters what points along the gradient: the loss would grow. "
            f"{_WAY}"
        )
    if raw:
        raise ConfigError(
            f"the optimizer adds the gradient itself to {_some(raw)}: optax.masked hands on what its mask "
            "leaves out. HINT: to freeze it, `trainable` of the configuration, or optax.multi_transform with "
            "optax.set_to_zero()."
        )
    return f"The optimizer moves {_some(up)} up the gradient, and the rest down. {_WAY}"


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _small(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct([min(n, 2) for n in p.shape], p.dtype), params)


def _asked(optimizer: Any, shapes: PyTree) -> _Asked:
    rng = np.random.default_rng(0)

    def stand_in(leaf: Any) -> jax.Array:
        kind = np.complex64 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float32
        values = rng.standard_normal(leaf.shape) + 0.5
        return jnp.asarray(values * (1 + 1j) if kind is np.complex64 else values, kind)

    grads = jax.tree.map(stand_in, shapes)
    # Parameters along the gradient: decay and the gradient pull one way, so that one update tells most rules.
    params, state = grads, optimizer.init(grads)
    first = optimizer.update(grads, state, params)[0]
    climbed = _along(first, grads)
    if _goes_down(climbed):
        return _Asked(climbed, [False] * len(climbed))
    negative = jax.tree.map(jnp.negative, grads)
    (up, up_state), (down, down_state) = (params, state), (params, state)
    total, raw = np.zeros(len(climbed)), [False] * len(climbed)
    for step in range(_STEPS):
        one, up_state = optimizer.update(grads, up_state, up)
        other, down_state = optimizer.update(negative, down_state, down)
        up, down = optax.apply_updates(up, one), optax.apply_updates(down, other)
        apart = jax.tree.map(lambda a, b: (a - b) / 2, one, other)
        if step == 0:
            pairs = zip(jax.tree.leaves(apart), jax.tree.leaves(grads), strict=True)
            raw = [bool(np.allclose(a, g, rtol=1e-5)) for a, g in pairs]
        total += _along(apart, grads)
        if _goes_down(total.tolist()):
            break
    return _Asked(total.tolist(), raw)


def _along(updates: PyTree, grads: PyTree) -> list[float]:
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True)
    return [float(np.sum(np.asarray(u) * np.conj(g)).real) for u, g in pairs]


def _goes_down(climbed: list[float]) -> bool:
    return min(climbed, default=0.0) < 0 and max(climbed, default=0.0) <= 0
