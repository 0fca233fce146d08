"""A model as an ordered list of layers: an nnx module with the interface of torch's Sequential.

A layer is settings and two pure functions; the model holds the layers' values as nnx variables, under the
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

# Importing a file of layers makes its kinds known to `load`.
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.models import activations, convolution, norms  # noqa: F401
from cyxjax.models.files import read_model, save_model
from cyxjax.models.layers import Layer, check_layer, layer_from_dict, layer_to_dict, summary_table

Values = tuple[dict[str, Any], dict[str, Any]]  # params, model_state: {"0_linear": {"kernel": ...}}


class SequentialModel(nnx.Module):
    """Each layer's output is the next one's input: `SequentialModel([LinearModule(4, 8), ReLUModule()])`.

    Parameters are drawn from `seed` on first use. Values that were read, loaded or set are what training
    starts from; otherwise training draws them from its own seed. Add layers before training: a trainer or a
    wrapper uses those there are when it is made.
    """

    def __init__(self, layers: Iterable[Layer] = (), *, seed: int = 0) -> None:
        self._layers: tuple[Layer, ...] = ()
        self._seed = seed
        self._num_with_values = 0  # of the layers, from the first one on
        self.deterministic = (
            False  # as nnx's own layers have it: `train` and `eval` of a module around set it
        )
        for one in layers:
            self.add(one)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in order."""
        return self._layers

    def add(self, one: Layer) -> "SequentialModel":
        """Appends a layer and returns the model; values the model has already are kept."""
        check_layer(one)
        self._layers = (*self._layers, one)
        if self._num_with_values:
            self._draw()
        return self

    def to_model_fns(self) -> ModelFns:
        """The pure (init, apply) pair of the layers as they are now.

        `init` returns copies of the values the model holds, if it holds any, and ignores its key then.
        """
        layers = self._layers
        values = (self.parameters(), self.model_state()) if self._num_with_values else None

        def init(key: jax.Array, inputs: PyTree) -> Values:
            del inputs
            # Copies, because the training step donates what it is given.
            return _init_layers(layers, key) if values is None else jax.tree.map(jnp.array, values)

        return ModelFns(init, partial(_apply_layers, layers))

    def to(self, device: Any) -> "SequentialModel":
        """The model itself: devices are the group's, and a wrapper or trainer refuses another one."""
        del device
        return self

    def parameters(self) -> dict[str, Any]:
        """Host arrays, {"0_linear": {"kernel": ..., "bias": ...}, ...}; drawn now if there are none."""
        return _host(self._held(nnx.Param))

    def model_state(self) -> dict[str, Any]:
        """What the forward pass itself changes (running statistics), as host arrays; {} if nothing."""
        return _host(self._held(nnx.BatchStat))

    def set_values(self, params: PyTree, model_state: PyTree) -> None:
        """Takes over trained values (host copies are kept).

        Raises: CheckpointError naming the first array that is missing, extra, or of another shape.
        """
        self._hold(_fitting(self._layers, (params, model_state), "the values given"))

    def ensure_values(self) -> None:
        """Draws what is not there yet: the layers' values, and the stream of random draws of direct calls."""
        self._draw()
        if not hasattr(self, "rngs"):
            self.rngs = nnx.Rngs(dropout=self._seed)

    @property
    def training(self) -> bool:
        """Whether direct calls drop out and use batch statistics."""
        return not self.deterministic

    def train(self, mode: bool = True) -> "SequentialModel":  # type: ignore[override]  # torch's signature
        """Direct calls drop out and use batch statistics from now on; returns the model."""
        self.deterministic = not mode
        return self

    def eval(self) -> "SequentialModel":  # type: ignore[override]
        """Direct calls are deterministic from now on and leave the statistics alone; returns the model."""
        return self.train(False)

    def forward(self, x: Any) -> jax.Array:
        """The output for inputs (B, ...), in the current mode; training updates running statistics."""
        self.ensure_values()
        values = self._held(nnx.Param), self._held(nnx.BatchStat)
        # Each call in training mode drops out other numbers.
        key = self.rngs.dropout() if self.training else jax.random.key(self._seed)
        x = jnp.asarray(x)
        # Within a traced step a program of its own would keep that step's sample weights.
        run = _apply_layers if isinstance(x, jax.core.Tracer) else _run
        output, new_state = run(self._layers, *values, x, key, self.training)
        if self.training:
            nnx.update(self, new_state)
        return output

    __call__ = forward

    def summary(self, input_shape: tuple[int, ...] | None = None) -> str:
        """A table of layers, parameters and, given one sample's `input_shape`, output shapes."""
        return summary_table(self._layers, layer_names(self._layers), input_shape)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes layers and values to one safetensors file; raises CheckpointError if that fails."""
        save_model(path, self.architecture(), self.parameters(), self.model_state())

    def architecture(self) -> dict[str, Any]:
        """The layers as JSON values, what `save` writes beside the parameters."""
        return {"type": "sequential", "layers": [layer_to_dict(one) for one in self._layers]}

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "SequentialModel":
        """The model in a file written by `save`; raises CheckpointError saying what is wrong with the file,
        ConfigError for a model that is none of this class, or has a layer that this program does not know."""
        architecture, *values = read_model(path)
        model = cls.from_architecture(architecture)
        model._hold(_fitting(model._layers, tuple(values), str(path)))
        return model

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any]) -> "SequentialModel":
        """The layers `architecture()` described, without values; raises ConfigError for what is not known."""
        if architecture.get("type") != "sequential":
            raise ConfigError(
                f"The model is of type {architecture.get('type')!r}, expected 'sequential'. "
                "HINT: read the file with load_model and build_model."
            )
        return cls(layer_from_dict(values) for values in architecture["layers"])

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __getitem__(self, place: int) -> Layer:
        return self._layers[place]

    def __repr__(self) -> str:
        lines = "".join(f"\n    {one}," for one in self._layers)
        return f"SequentialModel([{lines}\n])" if lines else "SequentialModel([])"

    __str__ = __repr__  # nnx has one of its own

    def _held(self, kind: type[nnx.Variable]) -> dict[str, Any]:
        """The values of the variables of `kind` by layer, as they are; drawn now if there are none."""
        self._draw()
        return nnx.to_pure_dict(nnx.state(self, kind))

    def _draw(self) -> None:
        """Draws the values of the layers that have none, from `seed`."""
        if self._num_with_values < len(self._layers):
            self._hold(_host(_init_layers(self._layers, jax.random.key(self._seed), self._num_with_values)))

    def _hold(self, values: Values) -> None:
        """Makes variables of `values`, in place of those that their layers had."""
        params, model_state = values
        for name in params.keys() | model_state.keys():
            own = jax.tree.map(nnx.Param, params.get(name, {}))
            setattr(self, name, nnx.Dict(own | jax.tree.map(nnx.BatchStat, model_state.get(name, {}))))
        self._num_with_values = len(self._layers)


def layer_names(layers: tuple[Layer, ...]) -> list[str]:
    """The name of each layer's parameters: its place and its kind, "0_linear"."""
    return [f"{place}_{one.kind}" for place, one in enumerate(layers)]


def _init_layers(layers: tuple[Layer, ...], key: jax.Array, start: int = 0) -> Values:
    """New (params, model_state) of `layers[start:]`; layers without any have no entry.

    Each layer's key depends on its place only, so a layer appended later changes nothing before it.
    """
    params: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for place, name in list(enumerate(layer_names(layers)))[start:]:
        of_layer = layers[place].init(jax.random.fold_in(key, place))
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


def _fitting(layers: tuple[Layer, ...], values: Values, source: str) -> Values:
    """Host copies of `values`; raises CheckpointError unless they are what `layers` need."""
    expected = jax.eval_shape(lambda: _init_layers(layers, jax.random.key(0)))
    for want, have in zip(expected, values, strict=True):
        wanted, held = _shapes(want), _shapes(have)
        for name in sorted(wanted.keys() | held.keys()):
            if wanted.get(name) != held.get(name):
                raise CheckpointError(
                    f"Array {name} of {source} has shape {held.get(name, 'none')}, the model's layers expect "
                    f"{wanted.get(name, 'none')}. HINT: build the model the values were trained with."
                )
    return _host(values)


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_leaves(tree)}


def _host(tree: PyTree) -> Any:
    """Copies on the host: they outlive donation, and a group of devices that is rebuilt."""
    return jax.tree.map(np.array, tree)
