"""Pairs of plain functions, or of a function and its values, as `ModelFns`: every library without classes.

    (init, apply)      init(key, inputs) or init(key) -> params; apply(params, inputs) -> output
    (params, apply)    values to begin with, in either order; (variables, module) of linen

What else `apply` takes it is given by name: a key for random draws (`key`, `rng`, ...), the mode (`train`,
`is_training`, ...), several inputs as a model's own, and `model_state` or `state`: init then returns
(params, state) and apply (output, state). Haiku's transformed functions and jax's stax are such pairs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.model.calls import call_arguments
from cyxjax.core.model.model_fns import ModelFns, PyTree
from cyxjax.errors import ConfigError

_STATE = ("model_state", "state")
_EITHER = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_pair(model: Any) -> bool:
    """Whether `model` is two functions, neither of which holds arrays, and not an optimizer."""
    if not isinstance(model, tuple | list) or len(model) != 2 or not all(map(_is_function, model)):
        return False
    return getattr(model, "_fields", ("init", "apply")) == ("init", "apply")


def values_and_function(model: Any) -> tuple[PyTree, Callable] | None:
    """(params, apply) of a pair of the two in either order; None for anything else.

    What has array leaves is the parameters, also where it can be called (a module of Equinox).
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


def _is_function(one: Any) -> bool:
    return callable(one) and not _holds_arrays(one)


def from_values(values: PyTree, apply: Callable) -> ModelFns:
    """A function that begins with `values`: `init` returns copies of them and ignores its key.

    Raises: ConfigError for variables of Flax that hold more than parameters: `apply` does not return them.
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
    """(init, apply) as functions of a model; see the head of this file."""
    takes = list(inspect.signature(apply).parameters.values())
    state = next((one.name for one in takes if one.name in _STATE), "")
    drawn = _in_stax(init) if _is_stax(init) else init
    always = {"rng": "key"} if _is_stax(init) else {}  # its layers pick it out of **kwargs

    def init_fns(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        # In training mode: Haiku's running statistics come to be there alone.
        made = _called(drawn, (key,), "", None, inputs, jax.random.fold_in(key, 1), True)
        return tuple(made) if state else (made, {})

    def apply_fns(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        more = {name: key for name in always}
        found = _called(apply, (params,), state, model_state, inputs, key, train, more)
        return found if state else (found, model_state)

    return ModelFns(init_fns, apply_fns)


def _called(
    function: Callable,
    first: tuple,
    state_name: str,
    state: PyTree,
    inputs: PyTree,
    key: jax.Array,
    train: bool,
    more: dict[str, Any] | None = None,
) -> Any:
    """`function(*first, ...)` with the state, inputs, keys and mode that its signature asks for."""
    whole = inspect.signature(function)
    rest = [one for one in list(whole.parameters.values())[len(first) :] if one.name != state_name]
    if not any(one.kind in (*_EITHER, one.VAR_POSITIONAL) for one in rest):
        return function(*first)  # parameters of a size of their own
    asked = lambda: None  # noqa: E731
    asked.__signature__ = whole.replace(parameters=rest)  # type: ignore[attr-defined]
    args, named = call_arguments(asked, inputs, key, train)
    named |= more or {}
    given = list(first)
    positional = [one for one in list(whole.parameters.values())[len(first) :] if one.kind in _EITHER]
    waiting = list(args)
    for one in positional:  # in their order: a key or a state may stand before the inputs
        if one.name == state_name:
            given.append(state)
        elif one.name in named:
            given.append(named.pop(one.name))
        elif waiting:
            given.append(waiting.pop(0))
        else:
            break
    return function(*given, *waiting, **named)


def _is_stax(init: Callable) -> bool:
    """Whether `init` is of jax.example_libraries.stax (or neural_tangents), told by what it takes."""
    return "input_shape" in inspect.signature(init).parameters


def _in_stax(init: Callable) -> Callable:
    """stax's `init(rng, input_shape) -> (output shape, params)` as ours."""
    return lambda key, inputs: init(key, (-1, *inputs.shape[1:]))[1]
