"""Batch statistics that leave padding out, and may span all replicas: for Flax's BatchNorm and ours.

A model cannot be handed weights through its call signature, so the step opens `batch_scope` around the
forward pass while it is traced, and the norm layers ask here. Outside a scope every row counts as one.
Why our own: flax averages replica means without their counts (flax#2417), wrong over unequal shards.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class _Scope(NamedTuple):
    weight: jax.Array | None  # shape (B,), 0 for padding
    axis: str | None  # mesh axis that statistics span


_NO_SCOPE = _Scope(None, None)
_scope: ContextVar[_Scope] = ContextVar("batch_scope", default=_NO_SCOPE)


@contextmanager
def batch_scope(weight: jax.Array | None, axis: str | None) -> Iterator[None]:
    """Rows count by `weight` (shape (B,)) in batch statistics; with `axis`, over all its replicas."""
    token = _scope.set(_Scope(weight, axis))
    try:
        yield
    finally:
        _scope.reset(token)


def stats_axis() -> str | None:
    return _scope.get().axis


def weighted_moments(x: jax.Array, feature_axes: tuple[int, ...] = (-1,)) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of `x` (B, ...) over all but `feature_axes`, padding excluded.

    Returns two float32 arrays of the features' shape. A replica whose rows are all padding gives 0, 0.
    Two passes, as torch does: E[x^2] - E[x]^2 loses half the digits when the mean is large.
    """
    weight, axis = _scope.get()
    features = {a % x.ndim for a in feature_axes}
    dims = tuple(d for d in range(x.ndim) if d not in features)
    x = x.astype(jnp.float32)
    rows = jnp.ones(x.shape[0], jnp.float32) if weight is None else weight
    rows = rows.reshape(-1, *[1] * (x.ndim - 1))
    cells = x.size // (x.shape[0] * math.prod(x.shape[d] for d in features))

    def total(v: jax.Array) -> jax.Array:
        return v if axis is None else lax.psum(v, axis)

    count = jnp.maximum(total(rows.sum() * cells), 1.0)
    mean = total((rows * x).sum(dims)) / count
    centred = x - jnp.expand_dims(mean, dims)
    return mean, total((rows * centred * centred).sum(dims)) / count


def normalise(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    features: tuple[int, ...],
    epsilon: float,
    dtype: Any,
) -> jax.Array:
    """(x - mean) / sqrt(var + epsilon) * scale + bias in float32, returned in `dtype` (default: x's)."""
    dims = tuple(d for d in range(x.ndim) if d not in features)

    def spread(v: jax.Array) -> jax.Array:
        return jnp.expand_dims(v.astype(jnp.float32), dims)

    gain = lax.rsqrt(spread(var) + epsilon)
    gain = gain if scale is None else gain * spread(scale)
    y = (x.astype(jnp.float32) - spread(mean)) * gain
    y = y if bias is None else y + spread(bias)
    return y.astype(x.dtype if dtype is None else dtype)


def as_axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
