"""ZeRO-1: each replica updates its part of every parameter and holds the optimizer's state of that part only.

reduce-scatter gradients -> optimizer on 1/R of the numbers -> all-gather the new parameters
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from cyxjax.core.exchange import in_pieces, reduce_scattered, together
from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED
from cyxjax.core.strategy import Stepped, Sync, norm
from cyxjax.core.trees import PyTree, widened
from cyxjax.sync.entry import Exchange, Strategy


def zero1(optimizer: optax.GradientTransformation, params: PyTree) -> Sync:
    """`mean` with the optimizer's state cut along axis `data`; the same bytes on the wire.

    The optimizer sees parts of the leaves (`part_shape`), in params' tree: rules that treat each number
    separately (SGD, Adam, AdamW, Lion, ..., with masks by path or dimension) are exact; `build_sync` refuses
    others (LAMB, Muon, clipping inside). params: shapes of the tree to be trained, or of one leaf for a
    rule without masks or labels. State: as `mean` holds it, each leaf a row of ceil(size / R) values per
    replica.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054.
    """

    def init(params: PyTree) -> PyTree:
        return optax.EmptyState(), optimizer.init(own_part(params))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        stepped = step_of_parts(optimizer, _reduce_scattered(grads), state, own_part(params))
        return stepped._replace(params=all_gathered(stepped.params, params))

    return Sync(
        init,
        update,
        state_spec=(REPLICATED, state_spec(optimizer, params)),
        stored_as=lambda state, params: (stored_as(optimizer, params), params),
    )


def step_of_parts(
    optimizer: optax.GradientTransformation, mean_grads: PyTree, state: PyTree, parts: PyTree
) -> Stepped:
    """A step on this replica's `parts` of the parameters, from those of the mean gradients."""
    updates, inner = optimizer.update(mean_grads, state[1], parts)
    parts = optax.apply_updates(parts, updates)
    return Stepped(parts, (optax.EmptyState(), inner), mean_grads, in_parts=True)


def stored_as(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Shapes of the state `mean` would have. params: arrays or their shapes."""
    return optax.EmptyState(), jax.eval_shape(optimizer.init, params)


def part_shape(shape: tuple[int, ...], num_replicas: int) -> tuple[int, ...]:
    """The shape of one replica's part of a leaf: (n, 1, ..., 1).

    It has the leaf's number of dimensions, for rules that read it (no decay for biases). Of a scalar, (1,).
    """
    size = int(np.prod(shape))
    return (-(-size // num_replicas), *[1] * (len(shape) - 1))


def state_spec(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Spec by leaf of the optimizer's state: counters are replicated, leaves shaped like params are rows."""
    flat = jax.tree.map(lambda p: jax.ShapeDtypeStruct(part_shape(p.shape, 1), p.dtype), params)
    state = jax.eval_shape(optimizer.init, flat)
    return jax.tree.map(lambda leaf: PER_REPLICA if leaf.ndim else REPLICATED, state)


def _rows(leaf: jax.Array) -> jax.Array:
    """(R, ceil(size / R)): a row per replica, zeros after the end."""
    count = lax.axis_size(AXIS)
    flat = leaf.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def own_part(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: _as_part(_rows(p)[lax.axis_index(AXIS)], p), params)


def _as_part(flat: jax.Array, leaf: jax.Array) -> jax.Array:
    return flat.reshape(part_shape(leaf.shape, lax.axis_size(AXIS)))


def _reduce_scattered(grads: PyTree) -> PyTree:
    """Own parts of the mean gradients: one reduction for all leaves of a dtype."""
    count = lax.axis_size(AXIS)
    rows = jax.tree.map(lambda g: _rows(widened(g) if g.dtype == jnp.float16 else g), grads)
    parts = _joined(rows, lambda r: reduce_scattered(r) / count)
    return jax.tree.map(lambda part, g: _as_part(part.astype(g.dtype), g), parts, grads)


def all_gathered(parts: PyTree, like: PyTree) -> PyTree:
    """Whole leaves shaped as `like` from every replica's parts: one gather for all leaves of a dtype."""
    if lax.axis_size(AXIS) == 1:
        return jax.tree.map(lambda part, p: part.reshape(p.shape), parts, like)
    gather = lambda part: lax.all_gather(part, AXIS, to="invarying")  # noqa: E731
    rows = _joined(jax.tree.map(jnp.ravel, parts), lambda part: in_pieces(gather, part))
    return jax.tree.map(lambda r, p: r.reshape(-1)[: p.size].reshape(p.shape), rows, like)


def _joined(tree: PyTree, collective: Callable[[jax.Array], jax.Array]) -> PyTree:
    """`collective` of all leaves of a dtype, joined along their last dimension and cut apart again."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, together(leaves, [leaf.dtype for leaf in leaves], collective))


def norm_of_parts(parts: PyTree) -> jax.Array:
    """The norm of all replicas' parts together."""
    return jnp.sqrt(lax.psum(norm(parts, squared=True), AXIS))


ENTRIES = {
    "zero1": Strategy(
        zero1,
        ("as `mean`", "none; the optimizer state is sharded", "optimizer state that fills the memory"),
        learns=None,  # the parameters of `mean`: tests/device/test_sync_contract.py
        sends=lambda params, size: [Exchange(False, size, 2)],
        cuts_leaves=True,
        in_memory_plan=True,
    )
}
