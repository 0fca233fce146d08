"""Activation layers; none has parameters.

Formulas and defaults are torch.nn's.
"""

import jax
import jax.numpy as jnp

from cyxjax.models.layers import Layer, layer


@layer("relu")
class ReLUModule(Layer):
    """max(x, 0)."""

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x)


@layer("leaky_relu")
class LeakyReLUModule(Layer):
    """x where positive, negative_slope * x elsewhere."""

    negative_slope: float = 0.01

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(x, self.negative_slope)


@layer("elu")
class ELUModule(Layer):
    """x where positive, alpha * (exp(x) - 1) elsewhere."""

    alpha: float = 1.0

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.elu(x, self.alpha)


@layer("gelu")
class GELUModule(Layer):
    """x * Phi(x), with the normal distribution itself; `approximate` takes the tanh form (GPT-2's)."""

    approximate: bool = False

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x, approximate=self.approximate)


@layer("silu")
class SiLUModule(Layer):
    """x * sigmoid(x), also called swish."""

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x)


@layer("tanh")
class TanhModule(Layer):
    """tanh(x)."""

    def call(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x)


@layer("sigmoid")
class SigmoidModule(Layer):
    """1 / (1 + exp(-x))."""

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(x)


@layer("softmax")
class SoftmaxModule(Layer):
    """exp(x) over its sum along `dim`. Not before CrossEntropyLoss, which takes logits."""

    dim: int = -1

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=self.dim)


@layer("log_softmax")
class LogSoftmaxModule(Layer):
    """The logarithm of softmax along `dim`, for NLLLoss."""

    dim: int = -1

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(x, axis=self.dim)
