"""Compressed gradients: float16, bfloat16, or int8 with a scale per block, with error feedback.

Each replica owns one part of the flat gradient. Each replica sends every owner its part, encoded; the owner
decodes, averages in float32, encodes the mean and sends it to all:

    encode -> all_to_all -> decode, widen, average -> encode -> all_gather -> decode

No number is ever added in the short format, and the bytes sent are those of an all-reduce of encoded
gradients. Both roundings (of what a replica sent, of the mean an owner sent) go into the next step.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cyxjax.core.exchange import in_pieces, raveled
from cyxjax.core.mesh import AXIS, PER_REPLICA
from cyxjax.core.strategy import Reducer, Sync, reduce_then
from cyxjax.core.trees import PyTree
from cyxjax.sync.entry import Exchange, Strategy


class Codec(NamedTuple):
    """A short form of float32 values, taken in blocks of `block` along the last dimension."""

    encode: Callable[[jax.Array], jax.Array]  # float32 (rows, n) -> integers (rows, m): what is sent
    decode: Callable[[jax.Array], jax.Array]  # back to float32 (rows, n)
    block: int = 1


class Residual(NamedTuple):
    """One row per replica. Its mean over replicas is what past mean gradients have left out."""

    unsent: Any  # float32 (number of real parameters,): added to this replica's next gradients


RESIDUAL_SPEC = PER_REPLICA


def coded_mean(codec: Codec, error_feedback: bool = True) -> Reducer:
    """Averages gradients over axis `data` in the codec's form. A single replica sends and loses nothing.

    State: Residual, one row per replica (spec RESIDUAL_SPEC); zeros that stay zeros without error feedback.
    Source: error feedback, Karimireddy et al. 2019, arXiv:1901.09847; on both ends, Tang et al. 2019,
    arXiv:1905.05957.
    """

    def init(params: PyTree) -> Residual:
        size = sum(leaf.size * (1 + jnp.iscomplexobj(leaf)) for leaf in jax.tree.leaves(params))
        return Residual(jnp.zeros(size, jnp.float32))

    def update(grads: PyTree, state: Residual, params: PyTree = None) -> tuple[PyTree, Residual]:
        if lax.axis_size(AXIS) == 1:
            return grads, state
        flat, unravel = raveled(jax.tree.map(_as_reals, grads))
        size = state.unsent.size
        mean, unsent = _exchange(codec, flat + jnp.pad(state.unsent, (0, flat.size - size)))
        mean_grads = jax.tree.map(_like, unravel(mean), grads)
        return mean_grads, Residual(unsent[:size]) if error_feedback else state

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # optax: any state


def _as_reals(grad: jax.Array) -> jax.Array:
    """float32; a complex gradient as (2, ...), its real and imaginary parts."""
    return (jnp.stack([grad.real, grad.imag]) if jnp.iscomplexobj(grad) else grad).astype(jnp.float32)


def _like(mean: jax.Array, grad: jax.Array) -> jax.Array:
    """Inverse of `_as_reals`, in the dtype of `grad`."""
    return (lax.complex(*mean) if jnp.iscomplexobj(grad) else mean).astype(grad.dtype)


def _exchange(codec: Codec, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean of `wanted` over replicas as all decode it, what encoding lost of `wanted`), both (n,)."""
    count, size = lax.axis_size(AXIS), wanted.size
    part = -(-size // (count * codec.block)) * codec.block  # equal parts of whole blocks; padding at the end
    rows = jnp.pad(wanted, (0, part * count - size)).reshape(count, part)
    sent = codec.encode(rows)
    received = codec.decode(in_pieces(lambda rows: lax.all_to_all(rows, AXIS, 0, 0), sent))
    # Row by row: `received.mean(0)` of two rows of 12 MB takes XLA on CPU (jax 0.10.2) 58 ms, and this 1 ms.
    mean = reduce(jnp.add, received) / count
    coded = codec.encode(mean[None])
    # `invarying`: all hold the same bytes, which the checked map could not know otherwise.
    everything = in_pieces(lambda row: lax.all_gather(row, AXIS, to="invarying"), coded[0])
    # The owner keeps the mean's rounding error: `count` times it on one replica is once in the mean.
    owed = count * (mean - codec.decode(coded)[0])
    unsent = (rows - codec.decode(sent)).at[lax.axis_index(AXIS)].add(owed)
    return codec.decode(everything).reshape(-1)[:size], unsent.reshape(-1)[:size]


def cast_reducer(dtype: Any, error_feedback: bool = True) -> Reducer:
    """Averages gradients over axis `data`, sending `dtype` (float16 or bfloat16); summed in float32.

    State: Residual (spec RESIDUAL_SPEC). With error feedback, what a finite value exceeds the largest of
    `dtype` by (65504 in float16) is sent in later steps; without it, such a value becomes infinite.
    """
    largest = float(jnp.finfo(dtype).max)

    # As integers: XLA on CPU widens 16-bit floats before it sends them (jax 0.10.2), but not integers.
    def encode(values: jax.Array) -> jax.Array:
        if error_feedback:
            values = jnp.where(jnp.isinf(values), values, jnp.clip(values, -largest, largest))
        return lax.bitcast_convert_type(values.astype(dtype), jnp.uint16)

    def decode(sent: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(sent, dtype).astype(jnp.float32)

    return coded_mean(Codec(encode, decode), error_feedback)


def fp16(optimizer: optax.GradientTransformation, error_feedback: bool = True) -> Sync:
    """`cast_reducer` to float16, then `optimizer` on the mean: half the bytes, 11 bits of mantissa."""
    return reduce_then(cast_reducer(jnp.float16, error_feedback), optimizer, RESIDUAL_SPEC)


def bf16(optimizer: optax.GradientTransformation, error_feedback: bool = True) -> Sync:
    """`cast_reducer` to bfloat16, then `optimizer` on the mean: half the bytes, float32's range."""
    return reduce_then(cast_reducer(jnp.bfloat16, error_feedback), optimizer, RESIDUAL_SPEC)


def int8(optimizer: optax.GradientTransformation, block: int = 256, error_feedback: bool = True) -> Sync:
    """Sends one byte per value and one float32 per `block` values, then `optimizer` on the mean.

    A block's largest value becomes 127, so a rounding is at most 1/254 of it. A quarter of the bytes.
    """

    def encode(values: jax.Array) -> jax.Array:
        """Rows of int8: the values, then the four bytes of each block's scale."""
        blocks = values.reshape(values.shape[0], -1, block)
        # XLA's maximum on CPUs loses some NaN, and x - x is NaN where x is not finite, else 0.
        largest = jnp.abs(blocks).max(-1, keepdims=True) + (blocks - blocks).sum(-1, keepdims=True)
        scale = largest / 127
        # A block of zeros has scale 0; NaN must stay NaN, so it may not be compared away.
        whole = jnp.round(blocks / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
        scales = lax.bitcast_convert_type(scale[..., 0], jnp.int8)
        return jnp.concatenate([a.reshape(values.shape[0], -1) for a in (whole, scales)], 1)

    def decode(sent: jax.Array) -> jax.Array:
        count = sent.shape[1] // (block + 4)
        whole = sent[:, : count * block].reshape(-1, count, block).astype(jnp.float32)
        scale = lax.bitcast_convert_type(sent[:, count * block :].reshape(-1, count, 4), jnp.float32)
        return (whole * scale[..., None]).reshape(sent.shape[0], -1)

    codec = Codec(encode, decode, block)
    return reduce_then(coded_mean(codec, error_feedback), optimizer, RESIDUAL_SPEC)


_RESIDUAL = "a residual per replica, as large as the gradients"
ENTRIES = {
    "fp16": Strategy(fp16, ("half", _RESIDUAL, "a network at its limit"), learns={}),
    "bf16": Strategy(
        bf16,
        ("half", _RESIDUAL, "a network at its limit"),
        sends=lambda params, size: [Exchange(False, size / 2, 2)],
        learns={},
    ),
    "int8": Strategy(
        int8,
        ("a quarter, and a scale for each 256 values", _RESIDUAL, "a slower network"),
        sends=lambda params, size: [Exchange(False, size / 4 * (1 + 4 / 256), 2)],
        lossless={"block": 4},
        usual={"block": 16},
        learns={},
    ),
}
