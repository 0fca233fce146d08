"""Small networks by name: a multilayer perceptron, a convolutional network, a variational autoencoder.

Shape suffixes: B samples, F features of one sample, H units of a hidden layer or height, W width, D channels,
C classes (or outputs), P pixels of one sample, L latent numbers."""

import math
from collections.abc import Callable
from typing import Any, Never, Self

import jax
import jax.numpy as jnp
from flax import linen as nn

from cyxjax.core.objective.task import bernoulli_error, divergence
from cyxjax.errors import ConfigError
from cyxjax.models.registry import Activation, Count, Positive, Rate, register


class Network(nn.Module):
    """A linen module that handles torch's calls `model.to(device)` and `model.parameters()`."""

    def to(self, device: Any) -> Self:
        """Returns the model unchanged: the process group sets the devices; trainers refuse any other."""
        del device
        return self

    def parameters(self) -> Never:
        """Raises: ConfigError: a linen network holds no values; a wrapper or a trainer does."""
        raise ConfigError(
            f"{type(self).__name__} holds no parameters; a wrapper or a trainer does. "
            "HINT: ddp = cx.distributed.DistributedDataParallel(model), cx.AdamOptimizer(ddp, lr=0.001).",
            key="model",
        )


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
                x_BHWD = nn.max_pool(x_BHWD, window_shape=(2, 2), strides=(2, 2))
        x_BF = x_BHWD.reshape(x_BHWD.shape[0], math.prod(x_BHWD.shape[1:]))
        x_BF = nn.relu(nn.Dense(self.hidden)(x_BF))
        x_BF = nn.Dropout(self.dropout, deterministic=not train)(x_BF)
        return nn.Dense(self.num_classes)(x_BF)


@register("vae")
class VAE(Network):
    """Encodes samples (B, ...) with values in [0, 1] to `latent_size` numbers and decodes them again.

    Returns a dict: loss (B,), float32, the negative evidence lower bound in nats per sample; reconstruction,
    of the inputs' shape, each value in (0, 1); mean and log_var (B, L).

    loss = sum_P BCE(x, decode(z)) + beta * KL(N(mean, var) || N(0, 1)), with z drawn from N(mean, var) in
    training and z = mean otherwise, so that evaluation needs no random key and repeats exactly.
    beta = 1 is the bound itself; for other values see Higgins et al. 2017 (beta-VAE).
    Source: Kingma & Welling 2013, arXiv:1312.6114: Bernoulli decoder (appendix C.1), closed-form KL
    divergence between the encoder's diagonal Gaussian and the standard normal (appendix B).
    """

    latent_size: Count = 16
    hidden: tuple[Count, ...] = (256, 128)
    beta: Positive = 1.0

    def setup(self) -> None:
        self.encoder = _Layers(self.hidden)
        self.decoder = _Layers(self.hidden[::-1])

    def __call__(self, x: jax.Array, train: bool = False) -> dict[str, jax.Array]:
        x_BP = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        mean_BL, log_var_BL = jnp.split(self.encoder(x_BP, 2 * self.latent_size), 2, axis=-1)
        z_BL = self._draw(mean_BL, log_var_BL) if train else mean_BL
        logits_BP = self.decoder(z_BL, x_BP.shape[1])
        return {
            "loss": negative_elbo(logits_BP, x_BP, mean_BL, log_var_BL, self.beta),
            "reconstruction": nn.sigmoid(logits_BP).reshape(x.shape),
            "mean": mean_BL,
            "log_var": log_var_BL,
        }

    def decode(self, z_BL: jax.Array, sample_shape: tuple[int, ...]) -> jax.Array:
        """Samples (B, *sample_shape) from latents: `model.apply(variables, z, (8, 8), method="decode")`."""
        logits_BP = self.decoder(z_BL, math.prod(sample_shape))
        return nn.sigmoid(logits_BP).reshape(z_BL.shape[0], *sample_shape)

    def _draw(self, mean_BL: jax.Array, log_var_BL: jax.Array) -> jax.Array:
        # The stream is "dropout" because every trainer of Flax models provides that one.
        noise_BL = jax.random.normal(self.make_rng("dropout"), mean_BL.shape, mean_BL.dtype)
        return mean_BL + jnp.exp(log_var_BL / 2) * noise_BL


def negative_elbo(
    logits_BP: jax.Array, x_BP: jax.Array, mean_BL: jax.Array, log_var_BL: jax.Array, beta: float = 1.0
) -> jax.Array:
    """Reconstruction error plus `beta` times divergence, shape (B,), in nats; float32 for any input dtype."""
    output = logits_BP, mean_BL, log_var_BL
    return bernoulli_error(output, x_BP) + beta * divergence(output, x_BP)


class _Layers(nn.Module):
    """Hidden layers with ReLU, then a linear layer with `num_outputs` outputs."""

    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, num_outputs: int) -> jax.Array:
        for size in self.hidden:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(num_outputs)(x)
