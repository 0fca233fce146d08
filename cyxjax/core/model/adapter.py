"""Every kind of model as `ModelFns`: linen, nnx (`SequentialModel` is one), and pairs of functions or values.

    (init, apply)      init(key, inputs) or init(key) -> params; apply(params, inputs) -> output
    (params, apply)    initial values and a function, in either order; (variables, module) for linen

Other arguments of `apply` are passed by name: a key for random draws (`key`, `rng`, ...), the mode (`train`,
`is_training`, ...), several inputs as for a model, and `model_state` or `state`: init then returns
(params, state) and apply returns (output, state). Haiku's transformed functions are such pairs."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.model.model_fns import POSITIONAL, ModelFns, call_arguments
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError


def adapt(model: Any) -> ModelFns:
    """`model` as `ModelFns`.

    Raises: ConfigError for anything but a Flax module, a pair of functions, or values and a function.
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
        init, apply = model
        # As plain functions they would train running statistics as parameters, and never get the mode.
        module = _module_of(apply)
        return adapt(module) if module is not None and _module_of(init) is module else from_pair(init, apply)
    found = values_and_function(model)
    if found is not None:
        module = _module_of(found[1])
        if module is not None:
            return adapt(module.bind(_as_variables(found[0])))
        return from_values(*found)
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    hint = (
        f"create an object of the class: {name}(...)."
        if isinstance(model, type)
        else "for other libraries, pass init(key, inputs) -> params and apply(params, inputs) -> output."
    )
    raise ConfigError(
        f"{name} is not a model; expected a flax.linen or flax.nnx module, two functions (init, apply), or "
        f"values and a function (params, apply). HINT: {hint}",
        key="model",
    )


def _module_of(function: Any) -> Any:
    """The linen module that `function` is or is a method of; else None."""
    owner = getattr(function, "__self__", function)
    return owner if is_module_of("flax.linen", owner) else None


def _as_variables(values: Any) -> Any:
    """`values` as linen's variables; bare parameters are put under "params"."""
    return values if isinstance(values, Mapping) and "params" in values else {"params": values}


def is_module_of(library: str, model: Any) -> bool:
    """Whether `model` is a Module of `library`; does not import it, since no such model exists without it."""
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(model, loaded.Module)


_STATE = ("model_state", "state")
_PAIR = ("init", "apply")  # a named tuple with other fields is an optimizer


def is_pair(model: Any) -> bool:
    """Whether `model` is two functions, neither of which holds arrays, and not an optimizer."""
    if not isinstance(model, tuple | list) or getattr(model, "_fields", _PAIR) != _PAIR:
        return False
    return len(model) == 2 and all(callable(one) and not _holds_arrays(one) for one in model)


def values_and_function(model: Any) -> tuple[PyTree, Callable] | None:
    """(params, apply) from a pair in either order; None for anything else.

    The element with array leaves is the parameters, even if it is callable (an Equinox module).
    """
    if type(model) not in (tuple, list) or len(model) != 2:
        return None
    if _holds_arrays(model[0]) == _holds_arrays(model[1]):
        return None
    values, apply = model if _holds_arrays(model[0]) else model[::-1]
    return (values, apply) if callable(apply) and not isinstance(apply, type) else None


def _holds_arrays(one: Any) -> bool:
    """Whether `one` is a tree whose leaves are arrays and numbers."""
    leaves = jax.tree.leaves(one)
    return bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray | float) for leaf in leaves)


def from_values(values: PyTree, apply: Callable) -> ModelFns:
    """A model that starts from `values`: `init` returns copies of them and ignores its key.

    Raises: ConfigError for Flax variables with more collections than params: `apply` does not return them.
    """
    others = sorted(values.keys() - {"params"}) if isinstance(values, Mapping) and "params" in values else []
    if others:
        raise ConfigError(
            f"the model is (variables, apply) and its variables hold {', '.join(others)} besides params: all "
            "would be trained as parameters. HINT: pass (variables, module) or (variables, module.apply), "
            "which keeps them as model state."
        )
    return from_pair(lambda key: jax.tree.map(jnp.array, values), apply)


def from_pair(init: Callable, apply: Callable) -> ModelFns:
    """(init, apply) as `ModelFns`; see the docstring of this module."""
    takes = list(inspect.signature(apply).parameters.values())
    state = next((one.name for one in takes if one.name in _STATE), "")

    def init_fns(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        # In training mode, because Haiku creates running statistics only there.
        made = _called(init, key, {}, inputs, jax.random.fold_in(key, 1), True)
        return tuple(made) if state else (made, {})

    def apply_fns(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        own = {state: model_state} if state else {}
        found = _called(apply, params, own, inputs, key, train)
        return found if state else (found, model_state)

    return ModelFns(init_fns, apply_fns)


def _called(
    function: Callable, first: Any, own: dict[str, Any], inputs: PyTree, key: jax.Array, train: bool
) -> Any:
    """`function(first, ...)` with `own` values by name, and the inputs, keys and mode that it takes."""
    rest = list(inspect.signature(function).parameters.values())[1:]
    open_ = [one for one in rest if one.name not in own]
    if not any(one.kind in (*POSITIONAL, one.VAR_POSITIONAL) for one in open_):
        return function(first)  # parameters that do not depend on the inputs
    args, named = call_arguments(function, inputs, key, train, known={one.name: one for one in open_})
    named, given, waiting = named | own, [first], list(args)
    for one in rest:  # in order: a key or a state may come before the inputs
        if one.kind in POSITIONAL and one.name in named:
            given.append(named.pop(one.name))
        elif one.kind in POSITIONAL and waiting:
            given.append(waiting.pop(0))
        else:
            break
    return function(*given, *waiting, **named)
