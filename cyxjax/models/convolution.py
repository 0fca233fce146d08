"""Convolution and pooling of images (B, H, W, C). Channels come last, unlike in torch.

A size is one integer for both sides, or a pair (height, width).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from cyxjax.errors import DataError
from cyxjax.models.layers import Arrays, Layer, along_last, kernel_and_bias, layer

max_pool = nn.max_pool  # launch/backend/lowerings.py makes its gradient fast on CPUs
Size = int | tuple[int, int]


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
    """Settings of a pooling layer; `stride` defaults to the window's size."""

    kernel_size: Size
    stride: Size | None = None
    padding: Size = 0


@layer("max_pool2d")
class MaxPool2DModule(_Pool2D):
    """The maximum of each window; `stride` defaults to the window's size."""

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
    """The mean of each window, padding counted as zeros (torch's count_include_pad=True)."""

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
            "HINT: for grey images without channels, put ReshapeModule((height, width, 1)) first."
        )
