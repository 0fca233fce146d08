"""Initial parameters from a file (`init_from`)."""

from typing import Any

import jax
import numpy as np

from cyxjax.core.model.lora import is_adapter
from cyxjax.core.trees import named_leaves
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.train.settings import FirstValues
from cyxjax.weights import Weights
from cyxjax.weights.match import fill
from cyxjax.weights.read import read_weights

PyTree = Any


def with_first_values(
    first: FirstValues, params: PyTree, model_state: PyTree
) -> tuple[PyTree, PyTree, list[str]]:
    """(params, model_state) with the arrays that `first` names in place of those drawn; a table of them.

    Adapters (LoRA) stay as drawn. Raises: ConfigError for a file that cannot be read or does not fit.
    """
    assert first.path is not None
    drawn = {"params": params, "model_state": model_state}
    leaves = dict(named_leaves(drawn))
    targets = {name: leaf for name, leaf in leaves.items() if not is_adapter(name)}
    try:
        weights = read_weights(first.path)
        _refuse_adapters(weights, first.path)
        found = fill(weights, targets, dict(first.rules), strict=first.strict)
    except CheckpointError as err:  # before anything is trained or written: a wrong configuration
        raise ConfigError(str(err), key="init_from.path") from err
    values = [found.values.get(name, np.asarray(leaf)) for name, leaf in leaves.items()]
    trees = jax.tree.unflatten(jax.tree.structure(drawn), values)
    return trees["params"], trees["model_state"], found.table


def _refuse_adapters(weights: Weights, path: Any) -> None:
    """Raises: CheckpointError for adapters, which would be left out: the base alone is another model."""
    adapter = next((name for name in weights.arrays if is_adapter(name)), None)
    if adapter is not None:
        raise CheckpointError(
            f"{path} holds adapters apart from their kernels ({adapter}). HINT: begin with what "
            "`cyxjax export RUN merged.safetensors` writes, where they are added in."
        )
