"""Every kind of model as pure functions: linen, nnx (`SequentialModel` is one), and pairs of functions."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.model.pairs import from_pair, from_values, is_pair, values_and_function
from cyxjax.errors import ConfigError


def adapt(model: Any) -> ModelFns:
    """`model` as `ModelFns`.

    Raises: ConfigError for anything that is not a Flax module or a pair of functions, or of values and a
        function.
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
    if is_pair(model):
        whole = _module_of_methods(*model)
        return adapt(whole) if whole is not None else from_pair(*model)
    found = values_and_function(model)
    if found is not None:
        module = _module_of(found[1])
        if module is not None:
            return adapt(module.bind(_as_variables(found[0])))
        return from_values(*found)
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    hint = (
        f"make an object of the class: {name}(...)."
        if isinstance(model, type)
        else "from other libraries pass init(key, inputs) -> params and apply(params, inputs) -> output."
    )
    raise ConfigError(
        f"{name} is not a model; expected a flax.linen or flax.nnx module, two functions (init, apply), or "
        f"values and a function (params, apply). HINT: {hint}",
        key="model",
    )


def _module_of(apply: Any) -> Any:
    """The linen module that `apply` is, or whose `module.apply` it is; else None."""
    owner = getattr(apply, "__self__", apply)
    return owner if is_module_of("flax.linen", owner) else None


def _as_variables(values: Any) -> Any:
    """`values` as linen's variables: parameters alone stand under "params"."""
    return values if isinstance(values, Mapping) and "params" in values else {"params": values}


def is_module_of(library: str, model: Any) -> bool:
    """Whether `model` is a Module of `library`, which is not loaded to find out: without it there is none."""
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(model, loaded.Module)


def _module_of_methods(init: Callable, apply: Callable) -> Any:
    """The linen module whose (module.init, module.apply) these are; else None.

    As plain functions they would train its running statistics as parameters, and never pass the train flag.
    """
    owners = [getattr(one, "__self__", None) for one in (init, apply)]
    return owners[0] if owners[0] is owners[1] and is_module_of("flax.linen", owners[0]) else None
