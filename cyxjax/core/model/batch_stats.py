"""Batch statistics that exclude padding and may span all replicas, for BatchNorm of Flax and of cyxjax.

A model's call signature has no argument for the samples' weights, so the step opens `batch_scope` around the
forward pass while it is traced, and norm layers read it. Outside a scope every row has weight 1.
A norm whose input has the samples in its first dimension applies their weights; with another layout padding
cannot be excluded, and the result is NaN (the trainer and hand-written loops call `needs_full_batches`).
flax averages the means of replicas without their counts (flax#2417), which is wrong for unequal shards.
"""

import math
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.mesh import AXIS
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree, batch_shapes, widened
from cyxjax.errors import ConfigError


class StatsAxes(NamedTuple):
    """Mesh axes that batch statistics span; None: each replica has its own statistics."""

    every: str | None = None  # of all norms
    asked: str | None = None  # of norms that set `axis_name`
    refused: str = ""  # why no norm may set `axis_name`; "": norms may


OWN = StatsAxes()


class _Scope(NamedTuple):
    weight: jax.Array | None  # shape (B,), 0 for padding
    axes: StatsAxes
    noted: list[tuple[int, ...]] | None = None  # shapes of the norms' inputs; () if unweighted


_NO_SCOPE = _Scope(None, OWN)
_scope: ContextVar[_Scope] = ContextVar("batch_scope", default=_NO_SCOPE)


def batch_scope(
    weight: jax.Array | None, axes: StatsAxes = OWN, noted: list[tuple[int, ...]] | None = None
) -> AbstractContextManager[None]:
    """Weights samples by `weight` (shape (B,)) in batch statistics, which span `axes`.

    noted: a list to which norms append the shapes of their inputs.
    """
    return holding(_scope, _Scope(weight, axes, noted))


def needs_full_batches(fns: ModelFns, params: PyTree, model_state: PyTree, inputs: PyTree, key: Any) -> str:
    """A description of a norm that cannot exclude padding; "" if there is none.

    inputs: a batch, or its shapes. The model is traced for two batch sizes: a norm can exclude padding if the
    first dimension of its input is the batch, and no other dimension changes. Nothing is computed.
    """
    if not jax.tree.leaves(model_state) or any(not leaf.ndim for leaf in jax.tree.leaves(inputs)):
        return ""
    rows = len(jax.tree.leaves(inputs)[0])
    sizes = 7 * rows, 14 * rows  # multiples, for models that split a batch into groups
    try:
        one, two = (_shapes_of_norms(fns, params, model_state, batch_shapes(inputs, n), key) for n in sizes)
    except Exception:  # a model with a fixed batch size: the step finds out
        return ""
    for first, second in zip(one, two, strict=False):
        if first[:1] != sizes[:1] or second[:1] != sizes[1:] or first[1:] != second[1:]:
            shape = f"an input of shape {first}" if first else "all samples with equal weight"
            return f"a BatchNorm of the model takes {shape} for {sizes[0]} samples, not the batch first"
    return ""


def _shapes_of_norms(
    fns: ModelFns, params: PyTree, model_state: PyTree, inputs: PyTree, key: Any
) -> list[tuple[int, ...]]:
    noted: list[tuple[int, ...]] = []

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree) -> PyTree:
        with batch_scope(None, noted=noted):
            return fns.apply(params, model_state, inputs, key, True)

    jax.eval_shape(apply, params, model_state, inputs)
    return noted


def unweighed(normed: PyTree) -> PyTree:
    """The result of a norm with its own statistics, which count all samples: NaN if some are padding."""
    weight, _, noted = _scope.get()
    if noted is not None:
        noted.append(())
    if weight is None:
        return normed
    mark = lambda y: y * _all_count(weight).astype(y.dtype)  # noqa: E731
    return jax.tree.map(lambda y: mark(y) if jnp.issubdtype(y.dtype, jnp.inexact) else y, normed)


def weighted_moments(
    x: jax.Array, feature_axes: tuple[int, ...] = (-1,), *, mask: Any = None, axis: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mean, biased variance, count) of `x` (B, ...) over all but `feature_axes`, padding excluded.

    mask: True where a value counts, broadcast to the shape of x. axis: the axis to span; None: the scope's.
    Mean and variance are of the features' shape, float32 or as wide as `x`, 0 where nothing counts. count:
    float32, number of values, of the features' shape or ().
    Two passes, as in torch: E[x^2] - E[x]^2 loses half the digits when the mean is large.
    """
    weight, axes, noted = _scope.get()
    if noted is not None:
        noted.append(x.shape)
    axis = axes.every if axis is None else axis
    features = {a % x.ndim for a in feature_axes}
    dims = tuple(d for d in range(x.ndim) if d not in features)
    x = _in_float32_or_wider(x)
    rows = jnp.ones([1] * x.ndim) if weight is None else _row_weights(x, weight)
    cells = x.size // (rows.size * math.prod(x.shape[d] for d in features))

    def total(v: jax.Array) -> jax.Array:
        return v if axis is None else lax.psum(v, axis)

    if mask is None:
        count = total(rows.sum() * cells)
    else:
        mask = jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)
        x = jnp.where(mask, x, 0.0)  # no product: masked values may be NaN
        rows = jnp.where(mask, rows, 0.0)
        count = total(rows.sum(dims))
    by = jnp.maximum(count, 1.0)
    mean = total((rows * x).sum(dims)) / by
    centred = x - jnp.expand_dims(mean, dims)
    return mean, total((rows * centred * centred).sum(dims)) / by, count


def moved(old: jax.Array, batch: jax.Array, keep: Any, count: jax.Array) -> jax.Array:
    """The running statistic `keep * old + (1 - keep) * batch`; `old` where the batch has no values."""
    # Factors, not a choice between results: compiled with a choice, the last bit may change.
    keep, share = jnp.where(count == 0, 1.0, keep), jnp.where(count == 0, 0.0, 1 - keep)
    return keep * old + share * batch.astype(old.dtype)


def _row_weights(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`weight` along the first dimension of `x`; if that is not the batch, NaN unless all weights are > 0."""
    if x.shape[:1] == weight.shape:
        return weight.reshape(-1, *[1] * (x.ndim - 1))
    return _all_count(weight).reshape([1] * x.ndim)


def _all_count(weight: jax.Array) -> jax.Array:
    """1 if all weights are positive, else NaN."""
    return jnp.where((weight > 0).all(), 1.0, jnp.nan)


def moments_of(norm: Any, x: jax.Array, mask: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`weighted_moments` for the settings of a Flax norm, whose fields have the same names in linen and nnx.

    Any `axis_name` means the axis of the replicas. Raises: ConfigError if it is refused here or has groups,
    and for complex inputs, whose running mean Flax keeps as real numbers.
    """
    if jnp.iscomplexobj(x):
        raise ConfigError(
            f"a BatchNorm gets complex numbers of shape {list(x.shape)}: it would lose imaginary parts. "
            "HINT: normalise real and imaginary parts as separate features."
        )
    axis_name, groups, axes = norm.axis_name, norm.axis_index_groups, _scope.get().axes
    if axis_name is not None and (groups is not None or axes.refused):
        what = f"axis_index_groups={groups!r}" if groups is not None else f"axis_name={axis_name!r}"
        why = axes.refused or "statistics are computed per replica or over all replicas"
        raise ConfigError(f"a BatchNorm has {what}; {why}. HINT: remove it from the BatchNorm.")
    axis = None if axis_name is None else axes.asked
    return weighted_moments(x, _features(norm, x), mask=mask, axis=axis)


def is_of_the_model(axis_name: Any) -> bool:
    """Whether the model itself maps over `axis_name` (`vmap(..., axis_name=...)`), around this call."""
    if axis_name is None or axis_name == AXIS:
        return False
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def normalise(
    norm: Any,
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """(x - mean) / sqrt(var + epsilon) * scale + bias in float32 or wider, cast to the norm's dtype (default:
    Flax's).

    norm: a Flax norm, as in `moments_of`.
    """
    from flax.linen.dtypes import canonicalize_dtype  # here, because other models do not need Flax

    features = _features(norm, x)
    dims = tuple(d for d in range(x.ndim) if d not in features)

    def spread(v: jax.Array) -> jax.Array:
        return jnp.expand_dims(_in_float32_or_wider(v), dims)

    gain = lax.rsqrt(spread(var) + norm.epsilon)
    gain = gain if scale is None else gain * spread(scale)
    y = (_in_float32_or_wider(x) - spread(mean)) * gain
    y = y if bias is None else y + spread(bias)
    with jax.numpy_dtype_promotion("standard"):  # only computes a dtype
        return y.astype(canonicalize_dtype(x, scale, bias, dtype=norm.dtype))


def _in_float32_or_wider(x: jax.Array) -> jax.Array:
    return widened(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _features(norm: Any, x: jax.Array) -> tuple[int, ...]:
    """The feature dimensions of `x` for a norm, counted from 0."""
    axis: int | tuple[int, ...] = norm.axis
    return tuple(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
