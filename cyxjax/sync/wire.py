"""Averaging gradients that travel in few bits, and what rounding took coming along with the next step.

Each replica owns one part of the flat gradient. Everybody sends every owner its part, coded; the owner
decodes, averages in float32, codes the mean and sends it to all:

    code -> all_to_all -> decode, widen, average -> code -> all_gather -> decode

No number is ever added in the short format, and the bytes sent are those of an all-reduce of coded
gradients. Both roundings (what a replica sent, what an owner sent) are kept and added the next time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from cyxjax.core.mesh import AXIS, PER_REPLICA
from cyxjax.core.strategy import Reducer

PyTree = Any


class Codec(NamedTuple):
    """A short form of float32 values, taken in blocks of `block` along the last dimension."""

    encode: Callable[[jax.Array], jax.Array]  # float32 (rows, n) -> integers (rows, m): what is sent
    decode: Callable[[jax.Array], jax.Array]  # back to float32 (rows, n)
    block: int = 1


class Residual(NamedTuple):
    """What was not sent yet; a row per replica."""

    own: Any  # float32 (number of parameters,): lost when this replica coded its gradients
    mean: Any  # float32 (part,): lost when it coded the mean of the part it owns


RESIDUAL_SPEC = PER_REPLICA


def coded_mean(codec: Codec, error_feedback: bool = True) -> Reducer:
    """Averages gradients over axis `data` in the codec's form. A world of one sends and loses nothing.

    State: Residual, one row per replica (spec RESIDUAL_SPEC); zeros that stay zeros without error feedback.
    Source: error feedback, Karimireddy et al. 2019, arXiv:1901.09847; on both ends, Tang et al. 2019,
    arXiv:1905.05957.
    """

    def init(params: PyTree) -> Residual:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return Residual(jnp.zeros(size, jnp.float32), jnp.zeros(_part(size, codec.block), jnp.float32))

    def update(grads: PyTree, state: Residual, params: PyTree = None) -> tuple[PyTree, Residual]:
        del params
        if lax.axis_size(AXIS) == 1:
            return lax.pmean(grads, AXIS), state
        flat, unravel = ravel_pytree(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        mean, lost = _exchange(codec, flat + state.own, state.mean)
        mean_grads = jax.tree.map(lambda m, g: m.astype(g.dtype), unravel(mean), grads)
        return mean_grads, lost if error_feedback else state

    return optax.GradientTransformation(init, update)


def _part(size: int, block: int) -> int:
    """Values a replica owns: an equal part, in whole blocks; the last parts end in padding."""
    return -(-size // (lax.axis_size(AXIS) * block)) * block


def _exchange(codec: Codec, wanted: jax.Array, owed: jax.Array) -> tuple[jax.Array, Residual]:
    """(mean of `wanted` over replicas as all decode it, what coding took from this replica and its part)."""
    size, part = wanted.size, owed.size
    rows = jnp.pad(wanted, (0, part * lax.axis_size(AXIS) - size)).reshape(-1, part)
    sent = codec.encode(rows)
    own = (rows - codec.decode(sent)).reshape(-1)[:size]
    parts = codec.decode(lax.all_to_all(sent, AXIS, 0, 0))
    mean = parts.mean(0) + owed
    coded = codec.encode(mean[None])
    # `invarying`: all hold the same bytes, which the checked map could not know otherwise.
    everything = lax.all_gather(coded[0], AXIS, to="invarying")
    lost = Residual(own, mean - codec.decode(coded)[0])
    return codec.decode(everything).reshape(-1)[:size], lost
