"""Normalization layers: over the batch, over a sample's features, over groups of channels.

Statistics are float32 for any input dtype; the output has the input's dtype. Features come last.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.model.batch_stats import moved, weighted_moments
from cyxjax.models.layers import Arrays, Layer, along_last, layer


@layer("batch_norm")
class BatchNormModule(Layer):
    """(B, ..., features): each feature to mean 0 and variance 1 over the batch, then scale and bias.

    Training uses the statistics of the batch without padding (of all replicas under sync_batchnorm) and
    moves the running statistics towards them by `momentum`. Evaluation uses the running statistics.
    `momentum` is the weight of the new batch, as in torch: 0.1 corresponds to 0.9 in flax.
    Difference from torch: the running variance is the biased one, as in flax, because the number of samples
    differs between replicas.
    """

    features: int
    momentum: float = 0.1
    epsilon: float = 1e-5

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        ones, zeros = jnp.ones(self.features), jnp.zeros(self.features)
        return {"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        if not train:
            return _normalise(x, state["mean"], state["var"], params, self.epsilon), state
        mean, var, count = weighted_moments(x)
        keep, batch = 1.0 - self.momentum, {"mean": mean, "var": var}
        after = {name: moved(old, batch[name], keep, count) for name, old in state.items()}
        return _normalise(x, mean, var, params, self.epsilon), after


@layer("layer_norm")
class LayerNormModule(Layer):
    """(B, ..., features): each vector along the last dimension to mean 0, variance 1, then scale and bias."""

    features: int
    epsilon: float = 1e-5

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        return {"scale": jnp.ones(self.features), "bias": jnp.zeros(self.features)}, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        wide = x.astype(jnp.float32)
        mean, var = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
        return _normalise(x, mean, var, params, self.epsilon), state


@layer("group_norm")
class GroupNormModule(Layer):
    """(B, ..., num_channels): each sample's groups of channels to mean 0, variance 1, then scale and bias.

    Independent of the batch, hence of the number of replicas. Source: Wu & He 2018, arXiv:1803.08494.
    """

    num_groups: int
    num_channels: int
    epsilon: float = 1e-5

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        return {"scale": jnp.ones(self.num_channels), "bias": jnp.zeros(self.num_channels)}, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        width = self.num_channels // self.num_groups
        grouped = x.astype(jnp.float32).reshape(x.shape[0], -1, self.num_groups, width)
        mean, var = self._per_channel(grouped.mean((1, 3)), x), self._per_channel(grouped.var((1, 3)), x)
        return _normalise(x, mean, var, params, self.epsilon), state

    def _per_channel(self, per_group: jax.Array, x: jax.Array) -> jax.Array:
        """(B, groups) -> (B, 1, ..., 1, channels)."""
        per_channel = jnp.repeat(per_group, self.num_channels // self.num_groups, axis=1)
        return per_channel.reshape(x.shape[0], *[1] * (x.ndim - 2), self.num_channels)


def _normalise(x: jax.Array, mean: jax.Array, var: jax.Array, params: Arrays, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(var + epsilon) * scale + bias, computed in float32, in the dtype of `x`."""
    mean, var, scale, bias = (
        (along_last(v, x.ndim) if v.ndim == 1 else v).astype(jnp.float32)
        for v in (mean, var, params["scale"], params["bias"])
    )
    y = (x.astype(jnp.float32) - mean) * (lax.rsqrt(var + epsilon) * scale) + bias
    return y.astype(x.dtype)
