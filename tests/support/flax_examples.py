"""Small models with the calls of Flax's own examples: inputs, random keys, mode."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx, struct

from tests.support.models import UNIFORM, Dense

VOCAB, LENGTH, CLASSES = 7, 5, 3


class MnistNnx(nnx.Module):
    """mnist (nnx): batch norm, and dropout whose key is an argument of the call."""

    def __init__(self, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(rate=rate)
        self.out = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        return self.out(self.dropout(self.norm(x.reshape(x.shape[0], -1)), rngs=rngs))


class Vae(nn.Module):
    """vae: the key is an argument; returns a tuple."""

    @nn.compact
    def __call__(self, x, z_rng):
        h = nn.relu(nn.Dense(8, name="fc1")(x))
        mean, logvar = nn.Dense(2)(h), nn.Dense(2)(h)
        z = mean + jax.random.normal(z_rng, mean.shape) * jnp.exp(0.5 * logvar)
        return nn.Dense(x.shape[-1], name="fc2")(z), mean, logvar


class Sst2(nn.Module):
    """sst2: tokens and lengths; `deterministic` may be an argument of the constructor or of the call."""

    rate: float = 0.0
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, inputs, lengths, deterministic: bool | None = None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        x = nn.Embed(VOCAB, 6, embedding_init=UNIFORM)(inputs)
        x = nn.Dropout(self.rate)(x, deterministic=deterministic)
        # Compiles faster than their LSTM and orthogonal values.
        cell = nn.SimpleCell(6, kernel_init=UNIFORM, recurrent_kernel_init=UNIFORM)
        x = nn.RNN(cell, name="lstm")(x, seq_lengths=lengths)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return Dense(CLASSES)(last)


@struct.dataclass
class TransformerConfig:
    """lm1b: the mode is in the configuration, which is the only field of the model."""

    rate: float = 0.0
    deterministic: bool = False


class Lm1b(nn.Module):
    """lm1b: takes only tokens."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(VOCAB, 8, embedding_init=UNIFORM)(inputs)
        return Dense(VOCAB)(nn.Dropout(self.config.rate)(x, deterministic=self.config.deterministic))


class GraphsTuple(NamedTuple):
    """Some of jraph's fields; here with one padded graph per row."""

    nodes: Any
    globals: Any
    n_node: Any


class Ogbg(nn.Module):
    """ogbg_molpcba: takes a named tuple; the mode is a field."""

    rate: float = 0.0
    deterministic: bool = True

    @nn.compact
    def __call__(self, graphs: GraphsTuple) -> jax.Array:
        h = nn.relu(Dense(6)(graphs.nodes))
        h = nn.Dropout(self.rate, deterministic=self.deterministic)(h)
        real = (jnp.arange(h.shape[1])[None] < graphs.n_node[:, None]).astype(h.dtype)
        return Dense(CLASSES)((h * real[..., None]).sum(1))


def graphs(rng: np.random.Generator, count: int) -> GraphsTuple:
    nodes = rng.normal(size=(count, 4, 3)).astype(np.float32)
    return GraphsTuple(nodes, None, rng.integers(1, 5, count).astype(np.int32))
