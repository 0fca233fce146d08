"""A model as an ordered list of layers, holding its parameters as torch's Sequential does.

Training goes through `to_model_fns`, two pure functions; the object itself is a shell that holds host copies
of the values, for direct calls, saving and loading.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.model.model_fns import ModelFns

# Importing a file of layers makes its kinds known to `load`.
from cyxjax.core.trees import named_leaves
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.models import activations, convolution, norms  # noqa: F401
from cyxjax.models.files import load_model, save_model
from cyxjax.models.layers import Layer, check_layer, layer_from_dict, layer_to_dict
from cyxjax.models.summary import summary_table

PyTree = Any
Values = tuple[dict[str, Any], dict[str, Any]]  # params, model_state: {"0_linear": {"kernel": ...}}


class SequentialModel:
    """Each layer's output is the next one's input: `SequentialModel([LinearModule(4, 8), ReLUModule()])`.

    Parameters are drawn from `seed` when first asked for. Values once seen, loaded or set are what training
    starts from; otherwise training draws them from its own seed.
    """

    def __init__(self, layers: Iterable[Layer] = (), *, seed: int = 0) -> None:
        self._layers: tuple[Layer, ...] = ()
        self._values: Values | None = None
        self._seed = seed
        self._num_calls = 0
        self._newest: Callable[[], Values] | None = None  # asked when values are next used
        self._source: Callable[[], Values] | None = None  # who gave the parameters; None: not a wrapper
        self.statistics_moved = False  # by a direct call, since a wrapper gave them
        self.training = True
        for one in layers:
            self.add(one)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in order."""
        return self._layers

    def add(self, one: Layer) -> "SequentialModel":
        """Appends a layer and returns the model; values the model has already are kept."""
        check_layer(one)
        if self._newest is not None:
            self._held()
        self._layers = (*self._layers, one)
        if self._values is not None:
            more = _host(_init_layers(self._layers, self._key(), len(self._layers) - 1))
            # New dicts: functions handed out by `to_model_fns` keep the old ones.
            self._values = (self._values[0] | more[0], self._values[1] | more[1])
        return self

    def to_model_fns(self) -> ModelFns:
        """The pure (init, apply) pair of the layers as they are now.

        `init` returns copies of the values the model holds, if it holds any, and ignores its key then.
        """
        if self._newest is not None:
            self._held()
        layers, values = self._layers, self._values

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
        return _copied(self._held()[0])

    def model_state(self) -> dict[str, Any]:
        """What the forward pass itself changes (running statistics), as host arrays; {} if nothing."""
        return _copied(self._held()[1])

    def set_values(self, params: PyTree, model_state: PyTree) -> None:
        """Takes over trained values (host copies are kept).

        Raises: CheckpointError naming the first array that is missing, extra, or of another shape.
        """
        self._values = _fitting(self._layers, (params, model_state), "the values given")
        self._newest = self._source = None

    def follow(self, newest: Callable[[], Values]) -> None:
        """Holds the values that `newest()` gives, of a wrapper that trains them; asked when they are used."""
        self._newest = self._source = newest
        self.statistics_moved = False

    def follows(self, newest: Callable[[], Values]) -> bool:
        """Whether the parameters are still what `newest` gave: nobody has set others since."""
        return self._source is newest

    def train(self, mode: bool = True) -> "SequentialModel":
        """Direct calls drop out and use batch statistics from now on; returns the model."""
        self.training = mode
        return self

    def eval(self) -> "SequentialModel":
        """Direct calls are deterministic from now on and leave the statistics alone; returns the model."""
        return self.train(False)

    def forward(self, x: Any) -> jax.Array:
        """The output for inputs (B, ...), in the current mode; in training, running statistics move."""
        params, state = self._held()
        key = jax.random.fold_in(self._key(), self._num_calls)
        output, new_state = _run(self._layers, params, state, jnp.asarray(x), key, self.training)
        if self.training:
            self._num_calls += 1  # the next call drops out other numbers
            self._values = (params, _host(new_state))
            self.statistics_moved = self.statistics_moved or bool(new_state)
        return output

    __call__ = forward

    def summary(self, input_shape: tuple[int, ...] | None = None) -> str:
        """A table of layers, parameters and, given one sample's `input_shape`, output shapes."""
        return summary_table(self._layers, layer_names(self._layers), input_shape)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes layers and values to one safetensors file; raises CheckpointError if that fails."""
        params, state = self._held()
        save_model(path, self.architecture(), params, state)

    def architecture(self) -> dict[str, Any]:
        """The layers as JSON values, what `save` writes beside the parameters."""
        return {"type": "sequential", "layers": [layer_to_dict(one) for one in self._layers]}

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "SequentialModel":
        """The model in a file written by `save`; raises CheckpointError saying what is wrong with it."""
        saved = load_model(path)
        try:
            model = cls.from_architecture(saved.architecture)
        except ConfigError as error:
            raise CheckpointError(
                f"{path} holds no SequentialModel this program can make: {error}"
            ) from error
        model._values = _fitting(model._layers, (saved.params, saved.model_state), str(path))
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

    def _key(self) -> jax.Array:
        return jax.random.key(self._seed)

    def __getstate__(self) -> dict[str, Any]:
        """A copy stays as it is, whatever is trained further."""
        if self._newest is not None:
            self._held()
        return self.__dict__ | {"_newest": None, "_source": None}

    def _held(self) -> Values:
        if self._newest is not None:
            self._values, self._newest = _host(self._newest()), None
        if self._values is None:
            self._values = _host(_init_layers(self._layers, self._key()))
        return self._values


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


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    """New dicts around the same arrays, so that a caller's changes to a dict stay the caller's."""
    return jax.tree.map(lambda a: a, tree)
