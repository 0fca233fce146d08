"""A small convolutional network for small images (digits, CIFAR).

Shape suffixes: B samples, H height, W width, D channels, F features of one sample, C classes.
"""

import math

import jax
from flax import linen as nn

from cyxjax.models.config import Count, Rate
from cyxjax.models.network import Network
from cyxjax.models.pooling import max_pool
from cyxjax.models.registry import register


@register("cnn")
class CNN(Network):
    """Logits (B, num_classes) of images (B, H, W, D) or (B, H, W).

    One 3x3 convolution, ReLU and 2x2 max pooling per entry of `features`, then one hidden layer.
    Pooling stops once a side is a single pixel, so images of any size are accepted.
    """

    num_classes: Count = 10
    features: tuple[Count, ...] = (32, 64)
    hidden: Count = 128
    dropout: Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x_BHWD = x[..., None] if x.ndim == 3 else x
        for num_channels in self.features:
            x_BHWD = nn.relu(nn.Conv(num_channels, (3, 3))(x_BHWD))
            if min(x_BHWD.shape[1:3]) > 1:
                x_BHWD = max_pool(x_BHWD, window_shape=(2, 2), strides=(2, 2))
        x_BF = x_BHWD.reshape(x_BHWD.shape[0], math.prod(x_BHWD.shape[1:]))
        x_BF = nn.relu(nn.Dense(self.hidden)(x_BF))
        x_BF = nn.Dropout(self.dropout, deterministic=not train)(x_BF)
        return nn.Dense(self.num_classes)(x_BF)
