"""One shape for every model: two pure functions, from linen, nnx, a pair or a SequentialModel."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax

from cyxjax.core.model.model_fns import ModelFns, PyTree
from cyxjax.errors import ConfigError


def adapt(model: Any) -> ModelFns:
    """`model` as `ModelFns`.

    Raises: ConfigError for anything that is not a Flax module, an (init, apply) pair or a SequentialModel.
    """
    if isinstance(model, ModelFns):
        return model
    if hasattr(model, "to_model_fns"):
        return ModelFns(*model.to_model_fns())
    if is_module_of("flax.linen", model):
        from cyxjax.core.model.linen_models import from_linen

        return from_linen(model)
    if is_module_of("flax.nnx", model):
        from cyxjax.core.model.nnx_models import from_nnx

        return from_nnx(model)
    if isinstance(model, tuple) and len(model) == 2 and all(callable(f) for f in model):
        return _from_pair(*model)
    raise ConfigError(
        f"{type(model).__name__} is not a model cyxjax knows; expected a flax.linen or flax.nnx Module, "
        "a pair (init, apply) or a cx.SequentialModel. HINT: for other libraries pass (init, apply) with "
        "init(key, inputs) -> params and apply(params, inputs) -> output."
    )


def is_module_of(library: str, model: Any) -> bool:
    """Whether `model` is a Module of `library`, which is not loaded to find out: without it there is none."""
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(model, loaded.Module)


def _from_pair(init: Callable, apply: Callable) -> ModelFns:
    """Pairs may leave out what they do not use: apply(params, inputs), with `key` and `train` by name."""
    known = inspect.signature(apply).parameters
    full = "model_state" in known

    def init_fns(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        made = init(key, inputs)
        return made if full else (made, {})

    def apply_fns(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        extra = {n: v for n, v in (("key", key), ("train", train)) if n in known}
        if full:
            return apply(params, model_state, inputs, **extra)
        return apply(params, inputs, **extra), model_state

    return ModelFns(init_fns, apply_fns)
