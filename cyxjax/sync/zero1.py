"""ZeRO-1: each replica updates its part of every parameter and holds the optimizer's state of that part only.

reduce-scatter gradients -> optimizer on 1/R of the numbers -> all-gather the new parameters
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED
from cyxjax.core.strategy import Sync
from cyxjax.errors import ConfigError
from cyxjax.sync.coded_mean import in_pieces

PyTree = Any


def zero1(optimizer: optax.GradientTransformation, max_grad_norm: float | None = None) -> Sync:
    """`mean` with the optimizer's state cut along axis `data`; the same bytes on the wire.

    The optimizer sees flat parts of the leaves, in params' tree: rules that treat each number by itself
    (SGD, Adam, AdamW, Lion, ...) are exact. max_grad_norm: clips the mean gradient's norm, which only all
    parts together know. State: as `mean` holds it, each leaf a row of ceil(size / R) values per replica.
    Raises: ConfigError for a rule that looks at whole leaves or at their norm (LAMB, clipping inside).
    Source: Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    refuse_unless_elementwise(optimizer)

    def init(params: PyTree) -> PyTree:
        return optax.EmptyState(), optimizer.init(_own_part(params))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        _, inner = state
        mean_part = _clipped(_reduce_scattered(grads), max_grad_norm)
        part = _own_part(params)
        updates, inner = optimizer.update(mean_part, inner, part)
        return _all_gathered(optax.apply_updates(part, updates), params), (optax.EmptyState(), inner)

    return Sync(
        init,
        update,
        state_spec=(REPLICATED, _state_spec(optimizer)),
        to_portable=lambda state, params: to_portable(optimizer, state, params),
        from_portable=lambda state, params, replicas: from_portable(optimizer, state, params, replicas),
    )


def to_portable(optimizer: optax.GradientTransformation, state: PyTree, params: PyTree) -> PyTree:
    """The state `mean` would have, from all rows of ours; on the host. params: arrays or their shapes."""
    wanted = (optax.EmptyState(), jax.eval_shape(optimizer.init, params))

    def whole(rows: Any, want: Any) -> np.ndarray:
        return np.asarray(rows).reshape(-1)[: want.size].reshape(want.shape)

    return jax.tree.map(whole, state, wanted)


def from_portable(
    optimizer: optax.GradientTransformation, state: PyTree, params: PyTree, num_replicas: int
) -> PyTree:
    """All rows for `num_replicas`, from the state of `mean`; on the host. Inverse of `to_portable`."""
    parts = jax.tree.map(lambda p: jax.ShapeDtypeStruct((-(-p.size // num_replicas),), p.dtype), params)
    wanted = (optax.EmptyState(), jax.eval_shape(optimizer.init, parts))

    def cut(array: Any, want: Any) -> np.ndarray:
        if not want.ndim:
            return np.asarray(array)
        flat = np.asarray(array).reshape(-1)
        return np.pad(flat, (0, want.size * num_replicas - flat.size)).reshape(num_replicas, want.size)

    return jax.tree.map(cut, state, wanted)


def refuse_unless_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Raises: ConfigError if the rule moves a number otherwise when it sees only half of the leaf."""

    def moved(part: slice) -> np.ndarray:
        params: Any = jnp.linspace(1.0, 3.0, 8)[part]
        state = None
        for scale in (1e4, 3e3):  # large: a clip by norm would show
            state = optimizer.init(params) if state is None else state
            grads = scale * jnp.linspace(-1.0, 2.0, 8)[part]
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return np.asarray(params)

    whole = moved(slice(0, 8))
    halves = np.concatenate([moved(slice(0, 4)), moved(slice(4, 8))])
    if not np.allclose(whole, halves, rtol=1e-5):
        raise ConfigError(
            "comm='zero1' shows the optimizer a part of each leaf, and this one looks at whole leaves or at "
            "the gradient's norm. HINT: clip with max_grad_norm of the configuration, or use comm='mean'."
        )


def _state_spec(optimizer: optax.GradientTransformation) -> PyTree:
    """Spec by leaf of the optimizer's state: counters are replicated, what is shaped like params is rows."""
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((2,), jnp.float32))
    return jax.tree.map(lambda leaf: PER_REPLICA if leaf.ndim else REPLICATED, state)


def _rows(leaf: jax.Array) -> jax.Array:
    """(R, ceil(size / R)): a row per replica, zeros after the end."""
    count = lax.axis_size(AXIS)
    flat = leaf.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _own_part(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: _rows(p)[lax.axis_index(AXIS)], params)


def _reduce_scattered(grads: PyTree) -> PyTree:
    """Own parts of the mean gradients: one reduction for all leaves of a dtype."""
    count = lax.axis_size(AXIS)
    rows = jax.tree.map(_rows, grads)
    return _joined(rows, lambda r: lax.psum_scatter(r, AXIS, scatter_dimension=0) / count)


def _all_gathered(parts: PyTree, like: PyTree) -> PyTree:
    """Whole leaves shaped as `like` from everybody's parts: one gather for all leaves of a dtype."""
    if lax.axis_size(AXIS) == 1:
        return jax.tree.map(lambda part, p: part.reshape(p.shape), parts, like)
    gather = lambda part: lax.all_gather(part, AXIS, to="invarying")  # noqa: E731
    rows = _joined(parts, lambda part: in_pieces(gather, part))
    return jax.tree.map(lambda r, p: r.reshape(-1)[: p.size].reshape(p.shape), rows, like)


def _joined(tree: PyTree, collective: Callable[[jax.Array], jax.Array]) -> PyTree:
    """`collective` of all leaves of a dtype, joined along their last dimension and cut apart again."""
    leaves, structure = jax.tree.flatten(tree)
    out: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        mine = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        done = collective(jnp.concatenate([leaves[i] for i in mine], axis=-1))
        ends = np.cumsum([leaves[i].shape[-1] for i in mine])[:-1]
        for i, piece in zip(mine, jnp.split(done, ends, axis=-1), strict=True):
            out[i] = piece
    return jax.tree.unflatten(structure, out)


def _clipped(parts: PyTree, max_norm: float | None) -> PyTree:
    """Parts of gradients whose norm over all replicas' parts is at most `max_norm`, as optax clips them."""
    if max_norm is None:
        return parts
    norm = jnp.sqrt(lax.psum(optax.tree.norm(parts, squared=True), AXIS))
    factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), parts)
