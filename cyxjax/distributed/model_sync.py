"""Keeps the values and the mode of the user's model equal to those of its wrapper or trainer.

nnx modules (`SequentialModel` is one) hold values, and a script saves, calls and evaluates that object, as
scripts for torch do. So trained values are written into its variables, and values set there are read before
each step.
"""

from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np

from cyxjax.core.model.adapter import is_module_of
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError

Values = tuple[PyTree, PyTree]  # params, model_state: nested dicts by the paths of the variables
_SWITCHES = ("deterministic", "use_running_average")  # what Module.train and Module.eval set


class _Variable(NamedTuple):
    """A variable of the module, its path, and the array that was last written into it."""

    path: tuple
    variable: Any
    pushed: Any
    is_param: bool


class ModelSync:
    """`push` writes values into the module's variables, by reference; `pull` reads those set since.

    Models that hold no values (linen, pairs of functions) ignore `push`; their mode is kept here.
    """

    def __init__(self, model: Any) -> None:
        self.holds_values = is_module_of("flax.nnx", model)
        self._module = model
        self._was_pushed = False
        self._scan()
        self._switches_seen = self._switches()
        self._training = not (self._switches_seen and all(self._switches_seen))

    def push(self, get_values: Callable[[], Values]) -> None:
        """Writes what `get_values` returns into the module: arrays on one device or on the host."""
        if not self.holds_values:
            return
        values = get_values()
        if not self._was_pushed:
            from cyxjax.core.model.nnx_models import draw_missing_values

            draw_missing_values(self._module)
            self._scan()
            self._was_pushed = True
        for i, one in enumerate(self._variables):
            value = reduce(getitem, one.path, values[not one.is_param])
            one.variable.set_value(jax.device_put(value))
            self._variables[i] = one._replace(pushed=one.variable.get_raw_value())

    def pull(self, num_processes: int) -> Values | None:
        """(params, model_state) as the module holds them, if any was set since `push`; else None.

        Raises: ConfigError if any was set and there are several processes.
        """
        changed = {one.path for one in self._changed()}
        if not changed:
            return None
        if num_processes > 1:
            name = _name(min(changed, key=str))
            raise ConfigError(
                f"{name!r} of the wrapped model was set, or changed by a call in training mode; other "
                "processes may not have its value. HINT: call model.eval() before you call the model itself; "
                "to set values use ddp.load_state_dict(saved) on all ranks.",
                key=name,
            )
        from flax.traverse_util import unflatten_dict  # as in `_scan`

        whole = unflatten_dict(
            {
                (one.is_param, *one.path): one.variable.get_raw_value() if one.path in changed else one.pushed
                for one in self._variables
            }
        )
        return whole.get(True, {}), whole.get(False, {})

    def refuse_changed_parameters(self) -> None:
        """Raises: ConfigError for a parameter set since the last `push`, for a trainer with its own copy."""
        for name in (_name(one.path) for one in self._changed() if one.is_param):
            raise ConfigError(
                f"the model's parameter {name!r} was set after this trainer trained it, and the trainer uses "
                "its own copy. HINT: create a new trainer for the model; it starts from the model's values.",
                key=name,
            )

    @property
    def training(self) -> bool:
        """Whether the module is in training mode, by the switches of its layers (`train()`, `eval()`).

        Raises: ConfigError where the switches differ: a wrapper runs the whole module in one mode.
        """
        now = self._switches()
        if now != self._switches_seen:
            if any(now) and not all(now):
                raise ConfigError(
                    "some layers of the model are in evaluation mode and others in training mode; a wrapper "
                    "runs all of them in one mode. HINT: model.train(), or model.eval()."
                )
            self._switches_seen, self._training = now, not any(now)
        return self._training

    @training.setter
    def training(self, mode: bool) -> None:
        if self.holds_values:
            (self._module.train if mode else self._module.eval)()
        self._switches_seen, self._training = self._switches(), mode

    def _scan(self) -> None:
        """Finds the variables, and the switches of the mode."""
        self._variables: list[_Variable] = []
        self._attributes: list[tuple[dict, str, Any]] = []  # of a part, a name there, and its value
        self._switch_places: list[tuple[dict, str]] = []
        if not self.holds_values:
            return
        from flax import nnx  # imported here: it takes a third of a second, and linen does not need it

        from cyxjax.core.model.nnx_models import is_sown

        parts = dict(nnx.iter_graph(self._module))
        for path, part in parts.items():
            if isinstance(part, nnx.Module):
                self._switch_places += [(vars(part), name) for name in _SWITCHES if name in vars(part)]
            is_state = isinstance(part, nnx.Variable) and not isinstance(part, nnx.RngState)
            if is_state and not is_sown(path, part):
                is_param = isinstance(part, nnx.Param)
                self._variables.append(_Variable(path, part, part.get_raw_value(), is_param))
            around = parts.get(path[:-1]) if path else None
            if isinstance(around, nnx.Module) and isinstance(part, nnx.Param | nnx.BatchStat | nnx.Module):
                self._attributes.append((vars(around), str(path[-1]), part))

    def _switches(self) -> list[bool]:
        found = [attributes.get(name) for attributes, name in self._switch_places]
        return [one for one in found if isinstance(one, bool)]

    def _changed(self) -> list[_Variable]:
        """The variables set since the last `push`. Raises: ConfigError for one that was replaced."""
        if not self._was_pushed:
            return []
        for attributes, name, part in self._attributes:
            if attributes.get(name) is not part:
                raise ConfigError(
                    f"{name!r} of the model was replaced after the model was wrapped. HINT: change the model "
                    "first, then wrap it; to set only values, write model.w[...] = values.",
                    key=name,
                )
        return [one for one in self._variables if _is_set(one)]


def _is_set(one: _Variable) -> bool:
    """Whether its value is not what was pushed; nnx's transformations leave new arrays of the same bits."""
    bits = lambda value: [(np.shape(a), np.asarray(a).tobytes()) for a in jax.tree.leaves(value)]  # noqa: E731
    now = one.variable.get_raw_value()
    return now is not one.pushed and bits(now) != bits(one.pushed)


def _name(path: tuple) -> str:
    return "/".join(map(str, path))
