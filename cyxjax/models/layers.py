"""The base class of layers; linear, embedding, dropout and shape layers; a table of layers.

A layer is a frozen value: its settings, plus two pure functions. Parameters live outside it, in the dicts
that `init` returns, so the same layer may be traced, copied and compared freely.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from cyxjax.errors import ConfigError, DataError, nearest
from cyxjax.models.registry import same_definition

Arrays = dict[str, jax.Array]
LayerType = TypeVar("LayerType", bound="Layer")
_kinds: dict[str, "type[Layer]"] = {}


class Layer:
    """The base of all layers: no parameters, no state; `apply` is for the layer to write."""

    kind: ClassVar[str]

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """New (params, state): what gradients change, and what only the forward pass changes."""
        del key
        return {}, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        """(output, new state) of inputs (B, ...); `key` is for random draws in training."""
        del params, key, train
        return self.call(x), state

    def call(self, x: jax.Array) -> jax.Array:
        """The output of a layer that needs nothing but its input."""
        raise TypeError(f"{type(self).__name__} defines neither call(x) nor apply(...). HINT: define one.")


@dataclass_transform(frozen_default=True)
def layer(kind: str) -> Callable[[type[LayerType]], type[LayerType]]:
    """A decorator that makes a Layer class a frozen dataclass, known in saved files as `kind`.

    Its fields must be numbers, truth values, strings, or tuples of these.
    Raises: ConfigError if `kind` is taken.
    """

    def decorate(cls: type[LayerType]) -> type[LayerType]:
        if kind in _kinds and not same_definition(_kinds[kind], cls):
            raise ConfigError(f"A layer of kind {kind!r} exists already. HINT: choose another kind.")
        made = dataclass(frozen=True)(cls)
        made.kind = kind
        _kinds[kind] = made
        return made

    return decorate


def check_layer(value: Any) -> None:
    """Raises ConfigError unless `value` is a layer of a class made with `@layer`."""
    made = _kinds.get(getattr(value, "kind", ""))
    # A subclass inherits its parent's kind: a saved file would bring back the parent instead.
    if made is None or not same_definition(made, type(value)):
        raise ConfigError(
            f"SequentialModel got {value!r} ({type(value).__name__}), expected a layer such as "
            "LinearModule(784, 256), its class decorated with @cyxjax.models.layer('its_kind'). HINT: pass "
            "Flax modules to the trainer directly."
        )


def layer_to_dict(one: Layer) -> dict[str, Any]:
    """The layer's kind and settings, ready for JSON."""
    return {"kind": one.kind, **asdict(one)}  # type: ignore[call-overload]  # every kind is a dataclass


def layer_from_dict(values: dict[str, Any]) -> Layer:
    """The layer `layer_to_dict` described; raises ConfigError for a kind that is not known."""
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    kind = settings.pop("kind", None)
    if kind not in _kinds:
        raise ConfigError(
            f"No layer of kind {kind!r}. HINT: {nearest(str(kind), _kinds)} Import your own first."
        )
    return _kinds[kind](**settings)


def uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Float32 drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Source: torch.nn.Linear and torch.nn.Conv2d, whose kaiming_uniform_(a=sqrt(5)) comes to this bound.
    """
    bound = 1.0 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def along_last(v: jax.Array, ndim: int) -> jax.Array:
    """A vector (F,) as (1, ..., 1, F), reshaped explicitly so that rank promotion may be disabled."""
    return v.reshape((1,) * (ndim - 1) + v.shape)


def check_features(one: Any, x: jax.Array, expected: int, hint: str) -> None:
    """Raises DataError unless the last dimension of `x` is `expected`."""
    if x.ndim < 2 or x.shape[-1] != expected:
        raise DataError(f"{one} got shape {x.shape}, expected (samples, ..., {expected}). HINT: {hint}")


@layer("linear")
class LinearModule(Layer):
    """(B, ..., in_features) -> (B, ..., out_features): x @ kernel + bias."""

    in_features: int
    out_features: int
    bias: bool = True

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        kernel_key, bias_key = jax.random.split(key)
        params = {"kernel": uniform(kernel_key, (self.in_features, self.out_features), self.in_features)}
        if self.bias:
            params["bias"] = uniform(bias_key, (self.out_features,), self.in_features)
        return params, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        del key, train
        check_features(self, x, self.in_features, "put FlattenModule() before it, or correct in_features.")
        y = x.astype(params["kernel"].dtype) @ params["kernel"]
        return (y + along_last(params["bias"], y.ndim) if self.bias else y), state


@layer("embedding")
class EmbeddingModule(Layer):
    """Whole numbers (B, ...) -> vectors (B, ..., embedding_dim), N(0, 1) at the start, as torch's.

    A number outside [0, num_embeddings) gives NaN, which a loss cannot overlook: compiled code cannot raise.
    """

    num_embeddings: int
    embedding_dim: int

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        return {"embedding": jax.random.normal(key, (self.num_embeddings, self.embedding_dim))}, {}

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        del key, train
        # Negative numbers would count from the end, as in Python: send them out of range too.
        place = jnp.where(x < 0, self.num_embeddings, x)
        return jnp.take(params["embedding"], place, axis=0, mode="fill", fill_value=jnp.nan), state


@layer("dropout")
class DropoutModule(Layer):
    """In training each number is zeroed with probability p and the others grow by 1 / (1 - p)."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.p < 1.0:
            raise ConfigError(
                f"DropoutModule: p is {self.p!r}, expected 0 <= p < 1. HINT: 0.1 to 0.5 is usual."
            )

    def apply(
        self, params: Arrays, state: Arrays, x: jax.Array, key: jax.Array, train: bool
    ) -> tuple[jax.Array, Arrays]:
        del params
        if not train or self.p == 0.0:
            return x, state
        keep = jax.random.bernoulli(key, 1.0 - self.p, x.shape)
        return jnp.where(keep, x / (1.0 - self.p), jnp.zeros_like(x)), state


@layer("flatten")
class FlattenModule(Layer):
    """(B, ...) -> (B, product of the rest); dimensions before `start_dim` stay."""

    start_dim: int = 1

    def call(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[: self.start_dim], math.prod(x.shape[self.start_dim :]))


@layer("reshape")
class ReshapeModule(Layer):
    """(B, ...) -> (B, *shape)."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a list would not hash, and layers must

    def call(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], *self.shape)


def summary_table(layers: Sequence[Layer], names: Sequence[str], input_shape: tuple[int, ...] | None) -> str:
    """One line per layer with its number of parameters and, given one sample's shape, its output shape.

    Raises: DataError where a layer cannot take what the one before it gives.
    """
    header = ["layer", "output", "params"]
    shapes = _output_shapes(layers, input_shape) if input_shape is not None else [""] * len(layers)
    counts = [count_params(jax.eval_shape(one.init, jax.random.key(0))[0]) for one in layers]
    rows = [[name, shape, f"{count:,}"] for name, shape, count in zip(names, shapes, counts, strict=True)]
    table = [header, *rows, ["total", "", f"{sum(counts):,}"]]
    columns = (0, 1, 2) if input_shape is not None else (0, 2)
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(_line(row, widths, columns) for row in table)


def _output_shapes(layers: Sequence[Layer], input_shape: tuple[int, ...]) -> list[str]:
    # Ids for an embedding, numbers for everything else.
    is_ids = bool(layers) and layers[0].kind == "embedding"
    x = jax.ShapeDtypeStruct((1, *input_shape), jnp.int32 if is_ids else jnp.float32)
    shapes = []
    for one in layers:
        x = jax.eval_shape(lambda x, one=one: _applied(one, x), x)
        shapes.append(f"({', '.join(['B', *map(str, x.shape[1:])])})")
    return shapes


def _applied(one: Layer, x: jax.Array) -> jax.Array:
    key = jax.random.key(0)
    return one.apply(*one.init(key), x, key, False)[0]


def _line(row: list[str], widths: list[int], columns: tuple[int, ...]) -> str:
    cells = [row[c].rjust(widths[c]) if c == 2 else row[c].ljust(widths[c]) for c in columns]
    return "  ".join(cells)


def count_params(params: Any) -> int:
    """The number of numbers in a pytree of arrays (or of `jax.eval_shape`'s shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
