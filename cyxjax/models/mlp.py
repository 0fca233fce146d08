"""A multilayer perceptron for vectors and small images.

Shape suffixes: B samples, F features of one sample, H units of a hidden layer, C classes (or outputs).
"""

import math
from collections.abc import Callable

import jax
from flax import linen as nn

from cyxjax.models.config import Activation, Count, Rate
from cyxjax.models.network import Network
from cyxjax.models.registry import register

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "tanh": nn.tanh,
    "silu": nn.silu,
}


@register("mlp")
class MLP(Network):
    """Logits (B, num_classes) of inputs (B, ...): each sample is flattened, then `hidden` layers follow.

    For regression, `num_classes` is the number of outputs. With `hidden=()` it is one linear layer.
    """

    num_classes: Count = 10
    hidden: tuple[Count, ...] = (256,)
    activation: Activation = "relu"
    dropout: Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x_BF = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        for size in self.hidden:
            x_BH = ACTIVATIONS[self.activation](nn.Dense(size)(x_BF))
            x_BF = nn.Dropout(self.dropout, deterministic=not train)(x_BH)
        return nn.Dense(self.num_classes)(x_BF)
