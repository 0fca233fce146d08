"""Convolution and pooling of images (B, H, W, C). Channels come last, unlike torch's.

A size is one whole number for both sides, or a pair (height, width).

`max_pool` has a fast gradient on CPUs, and the numbers of `flax.linen.max_pool`. XLA on CPU walks through the
gradient of a window one image place at a time: 16 of the 33 ms of a small CNN's step. Here a window is as
many strided views of the image as it has places, and all views are one vectorised loop: 30 times faster where
windows do not overlap, 8 times for 3x3 windows at stride 2.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from cyxjax.errors import DataError
from cyxjax.models.layers import Arrays, Layer, along_last, kernel_and_bias, layer

Size = int | tuple[int, int]
_MOST_PLACES = 64  # of a window; each is an array of the program, and large windows are few


def pair(size: Size) -> tuple[int, int]:
    """(height, width) of a size."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@layer("conv2d")
class Conv2DModule(Layer):
    """(B, H, W, in_channels) -> (B, H', W', out_channels).

    H' = (H + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1, and W' likewise.
    The kernel is (k, k, in_channels / groups, out_channels): torch's weight with axes (2, 3, 1, 0).
    """

    in_channels: int
    out_channels: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    dilation: Size = 1
    groups: int = 1
    bias: bool = True

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        shape = (*pair(self.kernel_size), self.in_channels // self.groups, self.out_channels)
        return kernel_and_bias(key, shape, self.bias), {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        y = lax.conv_general_dilated(
            x.astype(params["kernel"].dtype),
            params["kernel"],
            window_strides=pair(self.stride),
            padding=_both_ends(self.padding),
            rhs_dilation=pair(self.dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
        )
        return (y + along_last(params["bias"], y.ndim) if self.bias else y), state


@dataclass(frozen=True)
class _Pool2D(Layer):
    """Settings of a pooling; `stride` is the window's size unless given."""

    kernel_size: Size
    stride: Size | None = None
    padding: Size = 0


@layer("max_pool2d")
class MaxPool2DModule(_Pool2D):
    """The largest number under each window; `stride` is the window's size unless given."""

    def call(self, x: jax.Array) -> jax.Array:
        _check_image(self, x)
        return max_pool(
            x,
            window_shape=pair(self.kernel_size),
            strides=pair(self.stride or self.kernel_size),
            padding=_both_ends(self.padding),
        )


@layer("avg_pool2d")
class AvgPool2DModule(_Pool2D):
    """The mean under each window, padding counted as zeros (torch's count_include_pad=True)."""

    def call(self, x: jax.Array) -> jax.Array:
        _check_image(self, x)
        window = pair(self.kernel_size)
        # flax's avg_pool divides by an int32 array, which strict dtype promotion refuses (flax 0.12).
        total = nn.pooling.pool(
            x, 0.0, lax.add, window, pair(self.stride or self.kernel_size), _both_ends(self.padding)
        )
        return total / math.prod(window)


@layer("global_avg_pool")
class GlobalAvgPoolModule(Layer):
    """(B, H, W, C) -> (B, C): each channel's mean over the image."""

    def call(self, x: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=(1, 2))


def _both_ends(padding: Size) -> list[tuple[int, int]]:
    return [(side, side) for side in pair(padding)]


def _check_image(one: Layer, x: jax.Array) -> None:
    if x.ndim != 4:
        raise DataError(
            f"{one} got shape {x.shape}, expected images (samples, height, width, channels). "
            "HINT: for grey images without channels use ReshapeModule((height, width, 1)) first."
        )


class _Windows(NamedTuple):
    """Where windows lie; a tuple entry for each spatial dimension."""

    window: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    sides: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of windows."""
        spans = (side + sum(pad) for side, pad in zip(self.sides, self.pads, strict=True))
        return tuple((s - w) // t + 1 for s, w, t in zip(spans, self.window, self.steps, strict=True))


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
) -> jax.Array:
    """The largest number under each window of (..., spatial dimensions, channels), as `flax.linen.max_pool`.

    window_shape: a size for each spatial dimension. strides: 1 each unless given. padding: "VALID", "SAME",
    or (before, after) for each, as if of -inf. A window that holds a NaN is NaN; the gradient goes to
    the first of several largest numbers. On GPU and TPU it is flax's, which is quick there.
    """
    window = tuple(window_shape)
    steps = (1,) * len(window) if strides is None else tuple(strides)
    where = _windows(inputs, window, steps, padding)
    if where is None or jax.default_backend() != "cpu":
        return nn.max_pool(inputs, window, steps, padding)
    return _pool(inputs, where)


def _windows(x: jax.Array, window: tuple[int, ...], steps: tuple[int, ...], padding: Any) -> _Windows | None:
    """Where the windows lie; None where flax does the pooling: no floats, nothing to pool."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or not window or x.ndim <= len(window):
        return None
    sides = x.shape[-1 - len(window) : -1]
    if isinstance(padding, str):
        if padding not in ("VALID", "SAME"):
            return None
        padding = lax.padtype_to_pads(sides, window, steps, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    if not len(steps) == len(pads) == len(window) or min(*window, *steps, 1) < 1 or min(map(min, pads)) < 0:
        return None
    where = _Windows(window, steps, pads, sides)
    return where if min(where.counts) > 0 and int(np.prod(window)) <= _MOST_PLACES else None


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pool(x: jax.Array, where: _Windows) -> jax.Array:
    return reduce(jnp.maximum, _views(_padded(x, where, -jnp.inf), where))


@_pool.defjvp
def _pool_jvp(where: _Windows, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """A rule for tangents, linear in them: jax turns it around for gradients."""
    (x,), (t,) = primals, tangents
    # 16-bit gradients of overlapping windows add up in float32, and round once.
    wide = t.astype(jnp.float32) if t.dtype.itemsize < 4 else t
    picked = _picked(_padded(wide, where, 0.0), _winners(x, where), where)
    return _pool(x, where), picked.astype(t.dtype)


def _winners(x: jax.Array, where: _Windows) -> jax.Array:
    """uint8 (..., windows, channels): the number of the place in its window that won.

    As XLA chooses: a place stays chosen while it is >= the next one, and a comparison with NaN is false.
    """
    best, *others = _views(_padded(x, where, -jnp.inf), where)
    winner = jnp.zeros(best.shape, jnp.uint8)
    for place, view in enumerate(others, 1):
        wins = lax.bitwise_not(lax.ge(best, view))
        best = lax.select(wins, view, best)
        winner = lax.select(wins, lax.full_like(winner, place), winner)
    return winner


def _picked(t: jax.Array, winner: jax.Array, where: _Windows) -> jax.Array:
    """The entry of `t` at each window's winner."""
    if where.window != where.steps:
        parts = [
            jnp.where(winner == place, view, jnp.zeros_like(view))
            for place, view in enumerate(_views(t, where))
        ]
        return reduce(jnp.add, parts)
    # Windows that tile the image: cut it into them. Turned around, each place is written once.
    lead = t.ndim - 1 - len(where.window)
    ends = [count * size for count, size in zip(where.counts, where.window, strict=True)]
    tiles = lax.slice(t, (0,) * t.ndim, (*t.shape[:lead], *ends, t.shape[-1]))
    cut = [n for pair in zip(where.counts, where.window, strict=True) for n in pair]
    tiles = tiles.reshape(*t.shape[:lead], *cut, t.shape[-1])
    axes = tuple(range(lead + 1, lead + len(cut), 2))
    shape = [size if i % 2 else 1 for i, size in enumerate(cut)]
    place = lax.iota(jnp.uint8, math.prod(where.window)).reshape(*(1,) * lead, *shape, 1)
    won = jnp.broadcast_to(jnp.expand_dims(winner, axes) == place, tiles.shape)
    return lax.select(won, tiles, lax.full_like(tiles, 0)).sum(axes)


def _padded(x: jax.Array, where: _Windows, value: float) -> jax.Array:
    lead = x.ndim - 1 - len(where.window)
    widths = [(0, 0, 0)] * lead + [(low, high, 0) for low, high in where.pads] + [(0, 0, 0)]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths) if any(map(any, where.pads)) else x


def _views(x: jax.Array, where: _Windows) -> Iterator[jax.Array]:
    """For each place of a window, in order: what all windows see there, (..., windows, channels)."""
    lead = x.ndim - 1 - len(where.window)
    for offsets in product(*map(range, where.window)):
        ends = [o + (n - 1) * s + 1 for o, n, s in zip(offsets, where.counts, where.steps, strict=True)]
        starts = (*(0,) * lead, *offsets, 0)
        yield lax.slice(x, starts, (*x.shape[:lead], *ends, x.shape[-1]), (*(1,) * lead, *where.steps, 1))
