"""Residual networks, ResNet-18 and ResNet-50, with torchvision's layer shapes and padding.

Source: He et al. 2015, arXiv:1512.03385; the stride of a bottleneck sits on its 3x3 convolution
("v1.5", as torchvision does). `zero_init_residual`: Goyal et al. 2017, arXiv:1706.02677, section 5.1.
Difference from torch: flax's BatchNorm keeps the biased variance as running statistic, not the unbiased one.

Shape suffixes: B samples, H height, W width, D channels, C classes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from cyxjax.models.networks import Network
from cyxjax.models.registry import Count, register

# He et al. 2015, arXiv:1502.01852: variance 2 / fan_out keeps gradients level through ReLUs.
_conv_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def _conv(features: int, size: int, stride: int = 1, name: str | None = None) -> nn.Conv:
    """A convolution without bias (its norm has one), padded equally on both sides."""
    return nn.Conv(
        features, (size, size), stride, padding=size // 2, use_bias=False, kernel_init=_conv_init, name=name
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (B, H, W, D) -> (B, H/stride, W/stride, features)."""

    features: int
    stride: int
    zero_init: bool
    expansion = 1  # output channels per feature

    @nn.compact
    def __call__(self, x_BHWD: jax.Array, train: bool) -> jax.Array:
        norm = _norm(train)
        y_BHWD = nn.relu(norm()(_conv(self.features, 3, self.stride)(x_BHWD)))
        y_BHWD = norm(scale_init=_last_scale(self.zero_init))(_conv(self.features, 3)(y_BHWD))
        return nn.relu(y_BHWD + _shortcut(x_BHWD, y_BHWD, self.stride, norm))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut: (B, H, W, D) -> (B, H/stride, W/stride, 4 * features)."""

    features: int
    stride: int
    zero_init: bool
    expansion = 4

    @nn.compact
    def __call__(self, x_BHWD: jax.Array, train: bool) -> jax.Array:
        norm = _norm(train)
        y_BHWD = nn.relu(norm()(_conv(self.features, 1)(x_BHWD)))
        y_BHWD = nn.relu(norm()(_conv(self.features, 3, self.stride)(y_BHWD)))
        y_BHWD = norm(scale_init=_last_scale(self.zero_init))(_conv(4 * self.features, 1)(y_BHWD))
        return nn.relu(y_BHWD + _shortcut(x_BHWD, y_BHWD, self.stride, norm))


class ResNet(Network):
    """Logits (B, num_classes) of images (B, H, W, D)."""

    stage_sizes: tuple[int, ...]
    block: type[BasicBlock] | type[Bottleneck]
    num_classes: int = 1000
    width: int = 64
    small_images: bool = False
    zero_init_residual: bool = True

    @nn.compact
    def __call__(self, x_BHWD: jax.Array, train: bool = False) -> jax.Array:
        x_BHWD = self._stem(x_BHWD, train)
        for stage, num_blocks in enumerate(self.stage_sizes):
            for place in range(num_blocks):
                stride = 2 if stage > 0 and place == 0 else 1
                block = self.block(self.width * 2**stage, stride, self.zero_init_residual)
                x_BHWD = block(x_BHWD, train)
        return nn.Dense(self.num_classes, name="head")(jnp.mean(x_BHWD, axis=(1, 2)))

    def _stem(self, x_BHWD: jax.Array, train: bool) -> jax.Array:
        """The first layers: they divide each side by 4, but keep all pixels of small images."""
        size, stride = (3, 1) if self.small_images else (7, 2)
        x_BHWD = _conv(self.width, size, stride, name="stem")(x_BHWD)
        x_BHWD = nn.relu(_norm(train)(name="stem_norm")(x_BHWD))
        if self.small_images:
            return x_BHWD
        return nn.max_pool(x_BHWD, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


@register("resnet18")
def resnet18(
    num_classes: Count = 1000,
    width: Count = 64,
    small_images: bool = False,
    zero_init_residual: bool = True,
) -> ResNet:
    """ResNet-18 (11.69 M parameters at 1000 classes); `small_images` for sides of about 32 pixels."""
    return ResNet((2, 2, 2, 2), BasicBlock, num_classes, width, small_images, zero_init_residual)


@register("resnet50")
def resnet50(
    num_classes: Count = 1000,
    width: Count = 64,
    small_images: bool = False,
    zero_init_residual: bool = True,
) -> ResNet:
    """ResNet-50 (25.56 M parameters at 1000 classes); `small_images` for sides of about 32 pixels."""
    return ResNet((3, 4, 6, 3), Bottleneck, num_classes, width, small_images, zero_init_residual)


def _norm(train: bool) -> partial[nn.BatchNorm]:
    return partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)


def _last_scale(zero_init: bool) -> jax.nn.initializers.Initializer:
    """With 0, each block starts as its shortcut, which keeps the first steps of large batches stable."""
    return nn.initializers.zeros if zero_init else nn.initializers.ones


def _shortcut(x_BHWD: jax.Array, y_BHWD: jax.Array, stride: int, norm: partial[nn.BatchNorm]) -> jax.Array:
    """`x` itself, or its 1x1 projection where the block changed its shape."""
    if x_BHWD.shape == y_BHWD.shape:
        return x_BHWD
    x_BHWD = _conv(y_BHWD.shape[-1], 1, stride, name="shortcut")(x_BHWD)
    return norm(name="shortcut_norm")(x_BHWD)
