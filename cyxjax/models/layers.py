"""The base class of layers; linear, embedding, dropout and shape layers; activations.

A layer is a frozen dataclass of settings with two pure functions. Parameters live outside it, in the dicts
that `init` returns, so a layer can be traced, copied and compared freely. Formulas and defaults are those of
torch.nn.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from cyxjax.errors import ConfigError

Arrays = dict[str, jax.Array]
LayerType = TypeVar("LayerType", bound="Layer")
_kinds: dict[str, "type[Layer]"] = {}


class Layer:
    """Base class of layers, without parameters and state. A subclass defines `call(x)` or `apply`."""

    kind: ClassVar[str]

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """New (params, state): arrays that gradients change, and arrays that the forward pass changes.

        No name is in both.
        """
        return {}, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        """(output, new state) for inputs (B, ...); `key` is for random draws in training."""
        return self.call(x), state  # type: ignore[attr-defined]


@dataclass_transform(frozen_default=True)
def layer(kind: str) -> Callable[[type[LayerType]], type[LayerType]]:
    """A decorator that makes a Layer class a frozen dataclass, named `kind` in saved files.

    Its fields must be numbers, booleans, strings, or tuples of these.
    """

    def decorate(cls: type[LayerType]) -> type[LayerType]:
        made = dataclass(frozen=True)(cls)
        made.kind = kind
        _kinds[kind] = made
        return made

    return decorate


def check_layer(value: Any) -> None:
    """Raises ConfigError unless `value` is a layer of a class made with `@layer`."""
    # A subclass inherits its parent's kind: loading a saved file would return the parent instead.
    if _kinds.get(getattr(value, "kind", "")) is not type(value):
        raise ConfigError(
            f"SequentialModel got {value!r} ({type(value).__name__}), expected a layer such as "
            "LinearModule(784, 256), whose class is decorated with @cyxjax.models.layer('its_kind'). "
            "HINT: pass Flax modules to the trainer directly."
        )


def layer_to_dict(one: Layer) -> dict[str, Any]:
    """The layer's kind and settings, ready for JSON."""
    return {"kind": one.kind, **asdict(one)}  # type: ignore[call-overload]  # every kind is a dataclass


def layer_from_dict(values: dict[str, Any]) -> Layer:
    """The layer that `layer_to_dict` described; raises ConfigError for an unknown kind."""
    if values["kind"] not in _kinds:
        raise ConfigError(
            f"No layer of the kind {values['kind']!r} is known. HINT: import the module that defines "
            "it before the model is loaded."
        )
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key != "kind"}
    return _kinds[values["kind"]](**settings)


def kernel_and_bias(key: jax.Array, shape: tuple[int, ...], bias: bool) -> Arrays:
    """A kernel (..., out) and a bias (out,), float32 from U(-1/sqrt(n), 1/sqrt(n)), with n inputs per output.

    Source: torch.nn.Linear and torch.nn.Conv2d, whose kaiming_uniform_(a=sqrt(5)) gives this bound.
    """
    bound = 1.0 / math.sqrt(math.prod(shape[:-1]))
    kernel_key, bias_key = jax.random.split(key)
    params = {"kernel": jax.random.uniform(kernel_key, shape, jnp.float32, -bound, bound)}
    if bias:
        params["bias"] = jax.random.uniform(bias_key, shape[-1:], jnp.float32, -bound, bound)
    return params


def along_last(v: jax.Array, ndim: int) -> jax.Array:
    """A vector (F,) as (1, ..., 1, F), reshaped explicitly so that rank promotion may be disabled."""
    return v.reshape((1,) * (ndim - 1) + v.shape)


@layer("linear")
class LinearModule(Layer):
    """(B, ..., in_features) -> (B, ..., out_features): x @ kernel + bias."""

    in_features: int
    out_features: int
    bias: bool = True

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        return kernel_and_bias(key, (self.in_features, self.out_features), self.bias), {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        y = x.astype(params["kernel"].dtype) @ params["kernel"]
        return (y + along_last(params["bias"], y.ndim) if self.bias else y), state


@layer("embedding")
class EmbeddingModule(Layer):
    """Integers (B, ...) -> vectors (B, ..., embedding_dim), drawn from N(0, 1) at first, as in torch.

    An integer outside [0, num_embeddings) gives NaN, which shows in the loss: compiled code cannot raise.
    """

    num_embeddings: int
    embedding_dim: int

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        return {"embedding": jax.random.normal(key, (self.num_embeddings, self.embedding_dim))}, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        # Negative numbers would index from the end, as in Python: move them out of range too.
        x = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x  # int8 cannot hold `num_embeddings`
        place = jnp.where(x < 0, self.num_embeddings, x)
        return jnp.take(params["embedding"], place, axis=0, mode="fill", fill_value=jnp.nan), state


@layer("dropout")
class DropoutModule(Layer):
    """In training, sets each number to 0 with probability p < 1 and multiplies the others by 1 / (1 - p)."""

    p: float = 0.5

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        if not train or self.p == 0.0:
            return x, state
        keep = jax.random.bernoulli(key, 1.0 - self.p, x.shape)
        return jnp.where(keep, x / (1.0 - self.p), jnp.zeros_like(x)), state


@layer("flatten")
class FlattenModule(Layer):
    """(B, ...) -> (B, product of the rest); dimensions before `start_dim` are kept."""

    start_dim: int = 1

    def call(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[: self.start_dim], math.prod(x.shape[self.start_dim :]))


@layer("reshape")
class ReshapeModule(Layer):
    """(B, ...) -> (B, *shape)."""

    shape: tuple[int, ...]

    def call(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], *self.shape)


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
    """x * Phi(x), Phi the normal distribution function; `approximate` uses the tanh form (as GPT-2)."""

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
    """exp(x) divided by its sum along `dim`. Do not use before CrossEntropyLoss, which takes logits."""

    dim: int = -1

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=self.dim)


@layer("log_softmax")
class LogSoftmaxModule(Layer):
    """The logarithm of softmax along `dim`, for NLLLoss."""

    dim: int = -1

    def call(self, x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(x, axis=self.dim)


def count_params(params: Any) -> int:
    """The number of numbers in a pytree of arrays (or of `jax.eval_shape`'s shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
