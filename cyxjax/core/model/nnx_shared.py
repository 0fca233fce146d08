"""The values and the mode of an nnx module that a wrapper trains, in the user's own object."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cyxjax.core.model.nnx_models import is_drawn
from cyxjax.errors import ConfigError

PyTree = Any
Values = tuple[PyTree, PyTree]
_SWITCHES = ("deterministic", "use_running_average")  # what Module.train and Module.eval set


class _Held(NamedTuple):
    """A variable, its path in the module, and what it was last given."""

    path: tuple
    variable: nnx.Variable
    given: Any

    @property
    def is_param(self) -> bool:
        return isinstance(self.variable, nnx.Param)


class SharedVariables:
    """An nnx module's variables, but for its random streams; what it is given it holds by reference."""

    by_reference = True

    def __init__(self, module: nnx.Module) -> None:
        self._module, self._was_given = module, False
        self._scan()
        self._seen = self._switches()
        self._training = not (self._seen and all(self._seen))

    def give(self, now: Callable[[], Values]) -> None:
        """The module holds what `now()` says: (params, model_state), arrays on one device or the host's."""
        params, model_state = now()
        for i, one in enumerate(self._held):
            value = _at(params if one.is_param else model_state, one.path)
            one.variable.set_value(jax.tree.map(_as_array, value))
            self._held[i] = one._replace(given=one.variable.get_raw_value())
        self._was_given = True

    def taken(self) -> Values | None:
        """(params, model_state) as the module holds them, where any was set since `give`; else None.

        Raises: ConfigError where a parameter has another form than it had, or is there no more.
        """
        if not self._changed():
            return None
        now = [(one, one.variable.get_raw_value()) for one in self._held]
        return _tree(pair for pair in now if pair[0].is_param), _tree(p for p in now if not p[0].is_param)

    def params_set(self) -> str:
        """The name of a parameter that was set since the last `give`; "" for none, and before the first."""
        if not self._was_given:
            return ""
        return next((f"parameter {_name(one)!r}" for one in self._changed() if one.is_param), "")

    @property
    def training(self) -> bool:
        """By the switches of its layers, as `train()` and `eval()` of the module set them.

        Raises: ConfigError where they were set apart: a wrapper runs the whole in one mode.
        """
        now = self._switches()
        if now != self._seen:
            if any(now) and not all(now):
                raise ConfigError(
                    "some layers of the model were set to evaluation and others to training since it was "
                    "wrapped, and a wrapper runs them all in one mode. HINT: model.train(), or model.eval()."
                )
            self._seen, self._training = now, not any(now)
        return self._training

    @training.setter
    def training(self, mode: bool) -> None:
        (self._module.train if mode else self._module.eval)()
        self._seen, self._training = self._switches(), mode

    # ---- the object's own attributes -------------------------------------------------------------------

    def _scan(self) -> None:
        parts = dict(nnx.iter_graph(self._module))
        modules = [part for part in parts.values() if isinstance(part, nnx.Module)]
        self._switched = [(vars(one), name) for one in modules for name in _SWITCHES if name in vars(one)]
        self._links = [
            (vars(parts[path[:-1]]), str(path[-1]), part)  # attributes of a part, a name there, and its value
            for path, part in parts.items()
            if path and isinstance(part, nnx.Module | nnx.Variable)
            if isinstance(parts.get(path[:-1]), nnx.Module)
            and vars(parts[path[:-1]]).get(str(path[-1])) is part
        ]
        self._held = [
            _Held(path, part, part.get_raw_value())
            for path, part in parts.items()
            if isinstance(part, nnx.Variable) and not is_drawn(part)
        ]

    def _switches(self) -> list[bool]:
        found = [attributes.get(name) for attributes, name in self._switched]
        return [one for one in found if isinstance(one, bool)]

    def _changed(self) -> list[_Held]:
        """What was set since it was given; an array in another's place with its bits (nnx.jit) was not."""
        if not all(attributes.get(name) is part for attributes, name, part in self._links):
            before = self._held
            self._scan()
            self._held = _as_given(before, self._held)
        found = []
        for i, one in enumerate(self._held):
            value = one.variable.get_raw_value()
            if value is one.given:
                continue
            if _form(value) != _form(one.given):
                if not one.is_param:
                    continue  # what is sown grows
                raise _another(_name(one), value, one.given)
            if _same_bits(value, one.given):
                self._held[i] = one._replace(given=value)
            else:
                found.append(one)
        return found


def _as_given(before: list[_Held], now: list[_Held]) -> list[_Held]:
    """`before`, with the variables that stand there now; what a call has sown since is not ours.

    Raises: ConfigError for other parameters.
    """
    found = {one.path: one for one in now}
    params = {one.path for one in now if one.is_param}
    odd = params ^ {one.path for one in before if one.is_param}
    if odd:
        path = min(odd, key=str)
        raise ConfigError(
            f"the model's parameter {'/'.join(map(str, path))!r} {'came' if path in params else 'went'} "
            "after it was wrapped. HINT: change the model first, then wrap it."
        )
    return [one._replace(variable=found.get(one.path, one).variable) for one in before]


def _another(name: str, value: Any, given: Any) -> ConfigError:
    return ConfigError(
        f"the model's parameter {name!r} was set to {_form(value)}, it is {_form(given)} where the model was "
        "wrapped. HINT: set values of that form, or wrap the new model."
    )


def _as_array(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _name(one: _Held) -> str:
    return "/".join(map(str, one.path))


def _form(value: Any) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in map(jnp.asarray, jax.tree.leaves(value))]


def _same_bits(a: Any, b: Any) -> bool:
    leaves = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    if any(isinstance(y, jax.Array) and y.is_deleted() for _, y in leaves):
        return False
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def _at(tree: PyTree, path: tuple) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _tree(pairs: Iterable[tuple[_Held, Any]]) -> PyTree:
    whole: dict = {}
    for one, value in pairs:
        around = whole
        for key in one.path[:-1]:
            around = around.setdefault(key, {})
        around[one.path[-1]] = value
    return whole
