"""Saved models: reading a model file, and building the model that it describes."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import jax

from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.errors import ConfigError
from cyxjax.models.files import read_model
from cyxjax.models.registry import get_model, model_names
from cyxjax.models.sequential import SequentialModel


class SavedModel(NamedTuple):
    """The contents of a model file: JSON values, and two nested dicts of numpy arrays.

    A trainer or a `DistributedDataParallel` accepts it as its model and starts from its values.
    """

    architecture: dict[str, Any]
    params: Any
    model_state: Any

    def to_model_fns(self) -> ModelFns:
        """The model as functions, whose `init` returns copies of the saved values.

        Raises: ConfigError if `build_model` does not know the architecture.
        """
        built = adapt(build_model(self.architecture))
        values = (self.params, self.model_state)
        return built._replace(init=lambda key, inputs: jax.tree.map(jax.numpy.array, values))


def load_model(path: str | PathLike[str]) -> SavedModel:
    """Reads the model in a file that `save_model` wrote, arrays bit for bit.

    Raises: CheckpointError if the file is missing, cut short, damaged, or of another format.
    """
    return SavedModel(*read_model(path))


def build_model(architecture: Mapping[str, Any]) -> Any:
    """Builds the model that a saved file's architecture describes, without its values.

    A model that the file names as `module:attribute` is not imported: it must be registered under that name.
    Raises: ConfigError for a type, a model or an option that is not known.
    """
    kind = architecture.get("type")
    if kind == "registry":
        name = architecture["name"]
        if ":" in name and name not in model_names():
            raise ConfigError(
                f"The file names the model {name!r}, which this program has not registered. "
                f"HINT: if you trust the file, import that model and call cyxjax.register({name!r})(model)."
            )
        return get_model(name)(**architecture["options"])
    if kind == "sequential":
        return SequentialModel.from_architecture(architecture)
    raise ConfigError(
        f"An architecture of type {kind!r} cannot be built, expected 'registry' or 'sequential'. "
        "HINT: build the model in your program, and use the params of the file with it."
    )
