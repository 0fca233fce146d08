"""A model as an ordered list of layers: an nnx module with the interface of torch's Sequential.

A layer has settings and two pure functions; the model holds the layers' values as nnx variables, under the
names that parameters have in training and in files: `0_linear/kernel`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.trees import PyTree, is_traced
from cyxjax.errors import CheckpointError, ConfigError

# Importing a module of layers makes its kinds known to `load`.
from cyxjax.models import convolution, norms  # noqa: F401
from cyxjax.models.files import read_model, save_model
from cyxjax.models.layers import Layer, check_layer, count_params, layer_from_dict, layer_to_dict

Values = tuple[dict[str, Any], dict[str, Any]]  # params, model_state: {"0_linear": {"kernel": ...}}


class SequentialModel(nnx.Module):
    """Each layer's output is the next one's input: `SequentialModel([LinearModule(4, 8), ReLUModule()])`.

    Parameters are drawn from `seed` on first use. Training starts from values that were read, loaded or set;
    otherwise it draws them from its own seed. Add layers before training: a trainer or a wrapper uses the
    layers that exist when it is created.
    """

    def __init__(self, layers: Iterable[Layer] = (), *, seed: int = 0) -> None:
        self.layers: tuple[Layer, ...] = ()  # in order
        self._seed = seed
        self._num_with_values = 0  # number of layers that have values, counted from the first
        self.deterministic = False  # as in nnx's own layers: `train` and `eval` of a module around set it
        for one in layers:
            self.add(one)

    def add(self, one: Layer) -> "SequentialModel":
        """Appends a layer and returns the model; values that the model already has are kept."""
        check_layer(one)
        self.layers = (*self.layers, one)
        if self._num_with_values:
            self._draw()
        return self

    def to_model_fns(self) -> ModelFns:
        """The pure functions (init, apply) of the layers as they are now.

        If the model holds values, `init` returns copies of them and ignores its key.
        """
        layers = self.layers
        values = (self.parameters(), self.model_state()) if self._num_with_values else None

        def init(key: jax.Array, inputs: PyTree) -> Values:
            # Copies, because the training step donates what it is given.
            return _init_layers(layers, key) if values is None else jax.tree.map(jnp.array, values)

        return ModelFns(init, partial(_apply_layers, layers))

    def to(self, device: Any) -> "SequentialModel":
        """Returns the model unchanged: the process group sets the devices; trainers refuse any other."""
        return self

    def parameters(self) -> dict[str, Any]:
        """Host arrays, {"0_linear": {"kernel": ..., "bias": ...}, ...}; drawn now if there are none."""
        return _host(self._held(nnx.Param))

    def model_state(self) -> dict[str, Any]:
        """Arrays that the forward pass changes (running statistics), as host arrays; {} if there are none."""
        return _host(self._held(nnx.BatchStat))

    def set_values(self, params: PyTree, model_state: PyTree) -> None:
        """Sets the values to copies of these, in the form of `parameters()` and `model_state()`.

        Raises: ValueError (from JAX) for arrays of other names.
        """
        expected = jax.eval_shape(lambda: _init_layers(self.layers, jax.random.key(0)))
        self._draw()
        for values in jax.tree.map(lambda _, value: np.array(value), expected, (params, model_state)):
            nnx.update(self, values)

    def ensure_values(self) -> None:
        """Draws what is missing: the layers' values, and the random stream for direct calls."""
        self._draw()
        if not hasattr(self, "rngs"):
            self.rngs = nnx.Rngs(dropout=self._seed)

    @property
    def training(self) -> bool:
        """Whether direct calls apply dropout and use batch statistics."""
        return not self.deterministic

    def train(self, mode: bool = True) -> "SequentialModel":  # type: ignore[override]  # torch's signature
        """Makes direct calls apply dropout and use batch statistics; returns the model."""
        self.deterministic = not mode
        return self

    def eval(self) -> "SequentialModel":  # type: ignore[override]
        """Makes direct calls deterministic, without changes to the statistics; returns the model."""
        return self.train(False)

    def forward(self, x: Any) -> jax.Array:
        """The output for inputs (B, ...), in the current mode; training updates running statistics."""
        self.ensure_values()
        values = self._held(nnx.Param), self._held(nnx.BatchStat)
        # Each call in training mode draws a new dropout mask.
        key = self.rngs.dropout() if self.training else jax.random.key(self._seed)
        x = jnp.asarray(x)
        # Inside a traced step, a separate jit would keep that step's sample weights in its cache.
        run = _apply_layers if is_traced(x) else _run
        output, new_state = run(self.layers, *values, x, key, self.training)
        if self.training:
            nnx.update(self, new_state)
        return output

    __call__ = forward

    def summary(self, input_shape: tuple[int, ...] | None = None) -> str:
        """One line per layer: its name, its number of parameters and, given one sample's `input_shape`,
        its output shape."""
        lines, total, key = [], 0, jax.random.key(0)
        # Integers for an embedding, floats for everything else.
        dtype = jnp.int32 if self.layers and self.layers[0].kind == "embedding" else jnp.float32
        x = None if input_shape is None else jax.ShapeDtypeStruct((1, *input_shape), dtype)
        for name, one in zip(layer_names(self.layers), self.layers, strict=True):
            values = jax.eval_shape(one.init, key)
            if x is not None:
                x, _ = jax.eval_shape(lambda *given, one=one: one.apply(*given, False), *values, x, key)
            shape = "" if x is None else f"({', '.join(map(str, ['B', *x.shape[1:]]))})"
            lines.append(f"{name:24}{shape:24}{count_params(values[0]):14,}")
            total += count_params(values[0])
        return "\n".join([*lines, f"{'total':48}{total:14,}"])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes layers and values to one safetensors file; raises CheckpointError if that fails."""
        save_model(path, self.architecture(), self.parameters(), self.model_state())

    def architecture(self) -> dict[str, Any]:
        """The layers as JSON values, which `save` writes beside the parameters."""
        return {"type": "sequential", "layers": [layer_to_dict(one) for one in self.layers]}

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "SequentialModel":
        """The model in a file written by `save`.

        Raises: CheckpointError for any other file, ConfigError for a kind of layer that is not known.
        """
        architecture, *values = read_model(path)
        if architecture.get("type") != "sequential":
            raise CheckpointError(
                f"{path} holds a model of type {architecture.get('type')!r}, expected 'sequential'. HINT: "
                "cx.load_model(path) reads it."
            )
        model = cls.from_architecture(architecture)
        model.set_values(*values)
        return model

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any]) -> "SequentialModel":
        """A model of the layers that `architecture()` described, without values."""
        return cls(layer_from_dict(values) for values in architecture["layers"])

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, place: int) -> Layer:
        return self.layers[place]

    def _held(self, kind: type[nnx.Variable]) -> dict[str, Any]:
        """The values of the variables of `kind` by layer; drawn now if there are none."""
        self._draw()
        return nnx.to_pure_dict(nnx.state(self, kind))

    def _draw(self) -> None:
        """Draws the values of the layers that have none, from `seed`."""
        start = self._num_with_values
        if start == len(self.layers):
            return
        params, model_state = _host(_init_layers(self.layers, jax.random.key(self._seed), start))
        for name in params.keys() | model_state.keys():
            own = jax.tree.map(nnx.Param, params.get(name, {}))
            setattr(self, name, nnx.Dict(own | jax.tree.map(nnx.BatchStat, model_state.get(name, {}))))
        self._num_with_values = len(self.layers)


def layer_names(layers: tuple[Layer, ...]) -> list[str]:
    """The name of each layer's parameters: its index and its kind, "0_linear"."""
    return [f"{place}_{one.kind}" for place, one in enumerate(layers)]


def _init_layers(layers: tuple[Layer, ...], key: jax.Array, start: int = 0) -> Values:
    """New (params, model_state) of `layers[start:]`; layers without any have no entry.

    Each layer's key depends on its index only, so appending a layer changes nothing before it.
    Raises: ConfigError for a layer whose parameters and state share a name.
    """
    params: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for place, name in list(enumerate(layer_names(layers)))[start:]:
        of_layer = layers[place].init(jax.random.fold_in(key, place))
        if both := of_layer[0].keys() & of_layer[1].keys():
            raise ConfigError(
                f"layer {name}: a parameter and a state have the same name, {min(both)!r}, and a model file "
                "would hold one of them. HINT: rename one in the layer's init."
            )
        for whole, part in zip((params, state), of_layer, strict=True):
            if part:
                whole[name] = part
    return params, state


def _apply_layers(
    layers: tuple[Layer, ...], params: PyTree, model_state: PyTree, x: jax.Array, key: jax.Array, train: bool
) -> tuple[jax.Array, PyTree]:
    new_state = dict(model_state)
    for place, (name, one) in enumerate(zip(layer_names(layers), layers, strict=True)):
        layer_key = jax.random.fold_in(key, place)
        x, moved = one.apply(params.get(name, {}), model_state.get(name, {}), x, layer_key, train)
        if moved:
            new_state[name] = moved
    return x, new_state


_run: Callable[..., tuple[jax.Array, PyTree]] = jax.jit(_apply_layers, static_argnums=(0, 5))


def _host(tree: PyTree) -> Any:
    """Copies on the host, which stay valid after donation and after the group of devices is rebuilt."""
    return jax.tree.map(np.array, tree)
