"""Models as Flax's own examples have them, in our words and small: what is called how is theirs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx, struct

VOCAB, LENGTH, CLASSES = 7, 5, 3


class MnistNnx(nnx.Module):
    """mnist (nnx): batch norm, dropout whose key comes with the call."""

    def __init__(self, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(rate=rate)
        self.out = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        return self.out(self.dropout(x.reshape(x.shape[0], -1), rngs=rngs))


class Vae(nn.Module):
    """vae: the key is an argument; a tuple comes out."""

    latents: int = 2

    @nn.compact
    def __call__(self, x, z_rng):
        h = nn.relu(nn.Dense(8, name="fc1")(x))
        mean, logvar = nn.Dense(self.latents)(h), nn.Dense(self.latents)(h)
        z = mean + jax.random.normal(z_rng, mean.shape) * jnp.exp(0.5 * logvar)
        return nn.Dense(x.shape[-1], name="fc2")(z), mean, logvar


class DecoderCell(nn.RNNCellBase):
    """Feeds its guess back, or the teacher's token."""

    teacher_force: bool
    features: int

    @nn.compact
    def __call__(self, carry, x):
        lstm, last = carry
        x = x if self.teacher_force else last
        lstm, y = nn.LSTMCell(features=self.features)(lstm, x)
        logits = nn.Dense(VOCAB)(y)
        guess = jax.nn.one_hot(logits.argmax(-1), VOCAB, dtype=jnp.float32)
        return (lstm, guess), (logits, guess)

    @property
    def num_feature_axes(self):
        return 1


class Seq2seq(nn.Module):
    """seq2seq: two inputs by position, a pair out; teacher forcing is a field."""

    teacher_force: bool = True
    hidden: int = 6

    @nn.compact
    def __call__(self, encoder_inputs, decoder_inputs):
        encoder = nn.RNN(nn.LSTMCell(self.hidden), return_carry=True, name="encoder")
        carry, _ = encoder(encoder_inputs)
        decoder = nn.RNN(DecoderCell(self.teacher_force, self.hidden), name="decoder")
        logits, guesses = decoder(decoder_inputs[:, :-1], initial_carry=(carry, decoder_inputs[:, 0]))
        return logits, guesses


class Sst2(nn.Module):
    """sst2: tokens and lengths; `deterministic` may be given at birth or with the call."""

    rate: float = 0.0
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, inputs, lengths, deterministic: bool | None = None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        x = nn.Embed(VOCAB, 6)(inputs)
        x = nn.Dropout(self.rate)(x, deterministic=deterministic)
        x = nn.RNN(nn.LSTMCell(6), name="lstm")(x, seq_lengths=lengths)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return nn.Dense(CLASSES)(last)


@struct.dataclass
class TransformerConfig:
    """lm1b: the mode stands in the configuration, which is the model's one field."""

    width: int = 8
    rate: float = 0.0
    deterministic: bool = False
    dtype: Any = struct.field(pytree_node=False, default=jnp.float32)


class Lm1b(nn.Module):
    """lm1b: inputs that may be left out are None."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, inputs_positions=None, inputs_segmentation=None):
        c = self.config
        places = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        places = places if inputs_positions is None else inputs_positions
        x = nn.Embed(VOCAB, c.width)(inputs) + nn.Embed(LENGTH, c.width)(places)
        x = nn.Dropout(c.rate)(x, deterministic=c.deterministic)
        mask = nn.make_causal_mask(inputs)
        if inputs_segmentation is not None:
            same = nn.make_attention_mask(inputs_segmentation, inputs_segmentation, jnp.equal)
            mask = nn.combine_masks(mask, same)
        y = nn.MultiHeadDotProductAttention(2, deterministic=c.deterministic)(nn.LayerNorm()(x), mask=mask)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x + y))


class GraphsTuple(NamedTuple):
    """jraph's fields in its order; here with one padded graph a row."""

    nodes: Any
    edges: Any
    receivers: Any
    senders: Any
    globals: Any
    n_node: Any
    n_edge: Any


class Ogbg(nn.Module):
    """ogbg_molpcba: a graph network over a named tuple; the mode is a field."""

    rate: float = 0.0
    deterministic: bool = True

    @nn.compact
    def __call__(self, graphs: GraphsTuple) -> jax.Array:
        h = nn.Dense(6)(graphs.nodes)
        sent = jnp.take_along_axis(h, graphs.senders[..., None], axis=1) + nn.Dense(6)(graphs.edges)
        heard = jax.nn.one_hot(graphs.receivers, h.shape[1], axis=1, dtype=h.dtype) @ sent
        h = nn.Dropout(self.rate, deterministic=self.deterministic)(nn.relu(h + heard))
        real = (jnp.arange(h.shape[1])[None] < graphs.n_node[:, None]).astype(h.dtype)
        return nn.Dense(CLASSES)((h * real[..., None]).sum(1))


def graphs(rng: np.random.Generator, count: int) -> GraphsTuple:
    nodes, edges = 4, 6
    ends = rng.integers(0, nodes, (2, count, edges)).astype(np.int32)
    return GraphsTuple(
        rng.normal(size=(count, nodes, 3)).astype(np.float32),
        rng.normal(size=(count, edges, 2)).astype(np.float32),
        *ends,
        None,
        rng.integers(1, nodes + 1, count).astype(np.int32),
        np.full(count, edges, np.int32),
    )


def one_hot(tokens: np.ndarray) -> np.ndarray:
    return np.eye(VOCAB, dtype=np.float32)[tokens]
