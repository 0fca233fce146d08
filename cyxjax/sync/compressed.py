"""Compressed gradients: float16, bfloat16, or int8 with a scale per block."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cyxjax.core.strategy import Reducer, Sync, reduce_then
from cyxjax.errors import ConfigError
from cyxjax.sync.coded_mean import RESIDUAL_SPEC, Codec, coded_mean
from cyxjax.sync.entry import Exchange, Strategy

_SHORT = (jnp.float16, jnp.bfloat16)


def cast_reducer(dtype: Any, error_feedback: bool = True) -> Reducer:
    """Averages gradients over axis `data`, sending `dtype` (float16 or bfloat16); summed in float32.

    State: coded_mean.Residual (spec RESIDUAL_SPEC). A gradient above 65504 becomes infinite in float16.
    Raises: ConfigError for another dtype.
    """
    if dtype not in _SHORT:
        raise ConfigError(
            f"gradients cannot be sent as {jnp.dtype(dtype).name}. HINT: float16, bfloat16, or int8_reducer."
        )
    return coded_mean(_cast_codec(dtype), error_feedback)


def int8_reducer(block: int = 256, error_feedback: bool = True) -> Reducer:
    """Averages gradients over axis `data`, sending one byte a value and one float32 per `block` values.

    A block's largest value becomes 127, so a rounding is at most 1/254 of it.
    State: coded_mean.Residual (spec RESIDUAL_SPEC). Raises: ConfigError for a block below 1.
    """
    if block < 1:
        raise ConfigError(f"block={block}: expected a number of values, 1 or more. HINT: block=256.")
    return coded_mean(_int8_codec(block), error_feedback)


def fp16(optimizer: optax.GradientTransformation, error_feedback: bool = True) -> Sync:
    """`cast_reducer` to float16, then `optimizer` on the mean: half the bytes, 11 bits of mantissa."""
    return reduce_then(cast_reducer(jnp.float16, error_feedback), optimizer, RESIDUAL_SPEC)


def bf16(optimizer: optax.GradientTransformation, error_feedback: bool = True) -> Sync:
    """`cast_reducer` to bfloat16, then `optimizer` on the mean: half the bytes, float32's range."""
    return reduce_then(cast_reducer(jnp.bfloat16, error_feedback), optimizer, RESIDUAL_SPEC)


def int8(optimizer: optax.GradientTransformation, block: int = 256, error_feedback: bool = True) -> Sync:
    """`int8_reducer`, then `optimizer` on the mean: a quarter of the bytes."""
    return reduce_then(int8_reducer(block, error_feedback), optimizer, RESIDUAL_SPEC)


def _cast_codec(dtype: Any) -> Codec:
    # As integers: XLA on CPU widens 16-bit floats before it sends them (jax 0.10.2), integers it leaves.
    def encode(values: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(values.astype(dtype), jnp.uint16)

    def decode(sent: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(sent, dtype).astype(jnp.float32)

    return Codec(encode, decode)


def _int8_codec(block: int) -> Codec:
    """Rows of int8: the values, then the four bytes of each block's scale."""

    def encode(values: jax.Array) -> jax.Array:
        blocks = values.reshape(values.shape[0], -1, block)
        scale = jnp.abs(blocks).max(-1, keepdims=True) / 127
        # A block of zeros has scale 0; NaN must stay NaN, so it may not be compared away.
        whole = jnp.round(blocks / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
        scales = lax.bitcast_convert_type(scale[..., 0], jnp.int8)
        return jnp.concatenate([a.reshape(values.shape[0], -1) for a in (whole, scales)], 1)

    def decode(sent: jax.Array) -> jax.Array:
        count = sent.shape[1] // (block + 4)
        whole = sent[:, : count * block].reshape(-1, count, block).astype(jnp.float32)
        scale = lax.bitcast_convert_type(sent[:, count * block :].reshape(-1, count, 4), jnp.float32)
        return (whole * scale[..., None]).reshape(sent.shape[0], -1)

    return Codec(encode, decode, block)


_RESIDUAL = "a residual per replica, as large as the gradients"
ENTRIES = {
    "fp16": Strategy(fp16, ("half", _RESIDUAL, "a network at its limit, gradients below 65504"), learns={}),
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
