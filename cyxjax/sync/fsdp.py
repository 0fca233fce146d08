"""Fully sharded: each replica keeps a part of every parameter, and gathers a leaf where it is used.

all-gather parts -> forward -> (all-gather again) backward -> reduce-scatter gradients -> optimizer on parts

The gathers are in the model map; the transpose of a gather is the reduce-scatter of the gradients. `zero1`
defines what a part is, and how the optimizer's state is cut and stored.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cyxjax.core.exchange import reduce_scattered, together
from cyxjax.core.memory import GATHERED
from cyxjax.core.mesh import AXIS, PER_REPLICA
from cyxjax.core.strategy import Stepped, Sync
from cyxjax.core.trees import PyTree
from cyxjax.sync import zero1
from cyxjax.sync.entry import Exchange, Strategy

_TOGETHER_BYTES = 64 * 1024  # smaller leaves share one gather: each would cost a transfer's latency


def fsdp(optimizer: optax.GradientTransformation, params: PyTree, regather: bool = True) -> Sync:
    """Parameters, gradients and optimizer state cut along axis `data`; 1.5 times the bytes of `mean`.

    regather: backward gathers again, so that no whole leaf is kept from forward to backward. Without it whole
    parameters are kept for a step and the bytes are those of `mean` (ZeRO-2). Optimizers: as `zero1`.
    params: shapes of the tree to be trained.
    State: parameters and what the optimizer shapes like them are rows of ceil(size / R) values per replica.
    Where the model computes in 16 bits, parameters are sent in 16 bits; gradients are summed in float32.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
    """

    def update(mean_grads: PyTree, state: PyTree, parts: PyTree) -> Stepped:
        return zero1.step_of_parts(optimizer, mean_grads, state, parts)

    return zero1.zero1(optimizer, params)._replace(
        update=update,
        params_spec=PER_REPLICA,
        consensus=lambda parts: zero1.all_gathered(parts, params),
        hold=zero1.own_part,
        whole=lambda parts, dtype: whole(parts, params, dtype),
        regather=regather,
        stored_as=lambda state, kept: (zero1.stored_as(optimizer, params), params),
    )


def whole(parts: PyTree, like: PyTree, dtype: Any = None) -> PyTree:
    """Whole leaves shaped as `like` from this replica's parts; inside `model_map`, LOCAL to a replica.

    dtype: what the model computes in. Where it is shorter than a leaf's, the leaf is sent and returned in it:
    rounding before the gather equals rounding after it. Large leaves are gathered one by one, so that each
    is in memory as briefly as possible; small ones together.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.ravel, parts))
    is_small = lambda leaf: leaf.size * _shorter(leaf.dtype, dtype).itemsize <= _TOGETHER_BYTES  # noqa: E731
    kinds = [leaf.dtype if is_small(leaf) else i for i, leaf in enumerate(leaves)]
    rows = together(leaves, kinds, lambda part: _gathered(part, _shorter(part.dtype, dtype)))
    return jax.tree.map(_as_whole, jax.tree.unflatten(structure, rows), like)


def _as_whole(rows: jax.Array, like: jax.Array) -> jax.Array:
    return checkpoint_name(rows.reshape(-1)[: like.size].reshape(like.shape), GATHERED)


def _shorter(kept: Any, computes: Any) -> Any:
    """The dtype in which a leaf kept as `kept` is sent."""
    cast = computes is not None and jnp.issubdtype(kept, jnp.floating)
    return min(kept, jnp.dtype(computes), key=lambda dtype: dtype.itemsize) if cast else kept


def _gathered(part: jax.Array, dtype: Any) -> jax.Array:
    """(R, n) of `dtype` from every replica's (n,); its transpose averages, in float32 at least, and cuts."""
    count = lax.axis_size(AXIS)
    if count == 1 or not part.size:
        return jnp.broadcast_to(part.astype(dtype), (count, *part.shape))
    return _all_gathered(part, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_gathered(part: jax.Array, dtype: Any) -> jax.Array:
    # In one message, though gloo is slow with large ones: XLA would schedule some pieces of a gather far from
    # where the leaf is used. 36 layers of 9.4 MB: 257 MB of temporaries in pieces, 103 in one message.
    if dtype.itemsize > 2:
        return lax.all_gather(part, AXIS)
    # As integers: XLA on CPU widens 16-bit floats before it sends them (jax 0.10.2), but not integers.
    bits = lax.bitcast_convert_type(part.astype(dtype), jnp.uint16)
    return lax.bitcast_convert_type(lax.all_gather(bits, AXIS), dtype)


def _forward(part: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _all_gathered(part, dtype), jnp.zeros((0,), part.dtype)


def _backward(dtype: Any, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    # The mean, because a sum may overflow in float16. The transpose of the gather would round 16-bit sums.
    wide = grad if grad.dtype.itemsize > 2 else grad.astype(jnp.float32)
    return ((reduce_scattered(wide) / lax.axis_size(AXIS)).astype(like.dtype),)


_all_gathered.defvjp(_forward, _backward)


ENTRIES = {
    "fsdp": Strategy(
        fsdp,
        (
            "1.5 times `mean`; as `mean` with `regather: false` (ZeRO-2)",
            "none; parameters and optimizer state are sharded",
            "parameters that fill the memory",
        ),
        learns=None,  # the parameters of `mean`: tests/device/test_fsdp.py
        sends=lambda params, size: [Exchange(False, size, 3)],
        cuts_leaves=True,
        in_memory_plan=True,
    )
}
