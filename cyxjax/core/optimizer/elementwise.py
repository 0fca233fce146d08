"""Checks that an optimizer is elementwise, as strategies that shard its state need it to be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from cyxjax.core.trees import keys_as_bits, leaf_names
from cyxjax.errors import ConfigError

PyTree = Any
_MAX_DIM, _STEPS = 8, 8


def refuse_unless_elementwise(
    optimizer: optax.GradientTransformation, params: PyTree, cut: Callable, comm: str
) -> None:
    """Returns if the update of each number depends on the gradients, values and state of this number alone.

    Runs a few updates of small leaves (dimensions of at most 8) that hold one value each: NaN in every second
    gradient must not reach the others, and a part of a leaf must get the update of the whole leaf.
    params: shapes of the real tree. cut: (shape, parts) -> the shape of a part of a leaf of this shape.
    Raises: ConfigError naming a leaf.
    """
    grown = jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(3 * n for n in p.shape), p.dtype), params)
    states = [jax.tree.leaves(jax.eval_shape(optimizer.init, tree)) for tree in (params, grown)]
    if [tuple(3 * n for n in one.shape) for one in states[0]] != [one.shape for one in states[1]]:
        raise _needs_whole_leaves(comm, "keeps a state that is not shaped like the parameters")
    small = jax.tree.map(lambda p: jax.ShapeDtypeStruct([min(n, _MAX_DIM) for n in p.shape], p.dtype), params)
    parts = jax.tree.map(lambda p: jax.ShapeDtypeStruct(cut(p.shape, 2), p.dtype), small)
    with jax.debug_nans(False):
        try:
            (whole, numbers), (part, _) = _updates(optimizer, small), _updates(optimizer, parts)
        except TypeError as err:  # of jax.lax.scan
            raise _needs_whole_leaves(comm, "changes the type of its state from step to step") from err
    if not all(np.array_equal(clean, poisoned, equal_nan=True) for clean, poisoned in numbers):
        raise _needs_whole_leaves(comm, "keeps a number that depends on whole leaves in its state")
    for name, one, other in zip(leaf_names(params), whole, part, strict=True):
        clean, poisoned = one
        if not np.array_equal(clean[:, ::2], poisoned[:, ::2], equal_nan=True):
            raise _needs_whole_leaves(comm, f"computes the update of {name!r} from other gradients too")
        if not np.allclose(clean, clean[:, :1], rtol=1e-5, atol=0, equal_nan=True):
            raise _needs_whole_leaves(comm, f"treats the places within {name!r} differently")
        if not np.allclose(clean[:, :1], other[0][:, :1], rtol=1e-5, atol=0, equal_nan=True):
            raise _needs_whole_leaves(comm, f"depends on the shape of {name!r}")


def _updates(optimizer: optax.GradientTransformation, shapes: PyTree) -> list[list[np.ndarray]]:
    """By leaf, (2, steps, size): updates for gradients of one value, and with NaN in every second.

    Then the same of the state's scalars, (2, steps).
    """
    values = [0.3 + 0.1 * (i % 7) for i in range(len(jax.tree.leaves(shapes)))]  # told apart by leaf
    values = jax.tree.unflatten(jax.tree.structure(shapes), values)
    params = jax.tree.map(lambda p, value: jnp.full(p.shape, value, p.dtype), shapes, values)

    def poisoned(p: jax.Array) -> jax.Array:
        return jnp.where((jnp.arange(p.size) % 2).reshape(p.shape) == 1, jnp.nan, p).astype(p.dtype)

    def run(grads: PyTree) -> PyTree:
        def step(state: PyTree, _: None) -> tuple[PyTree, PyTree]:
            updates, state = optimizer.update(grads, state, params)
            scalars = [leaf for leaf in jax.tree.leaves(keys_as_bits(state)) if not leaf.shape]
            return state, (jax.tree.map(lambda u: u.reshape(-1), updates), scalars)

        return lax.scan(step, optimizer.init(params), length=_STEPS)[1]

    run = jax.jit(run)
    both = jax.device_get([run(grads) for grads in (params, jax.tree.map(poisoned, params))])
    return [
        [np.stack(pair) for pair in zip(*map(jax.tree.leaves, each), strict=True)]
        for each in zip(*both, strict=True)
    ]


def _needs_whole_leaves(comm: str, what: str) -> ConfigError:
    return ConfigError(
        f"comm={comm!r} gives the optimizer a part of each leaf, and this optimizer is not elementwise: it "
        f"{what}. HINT: clip with max_grad_norm of the configuration, or use comm='mean', which keeps leaves "
        "whole.",
        key="comm",
    )
