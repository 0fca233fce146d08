"""Optimizers under torch-like names, and by their names in a configuration file.

Each is an optax transformation that knows its learning rate and the model it updates.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import wraps
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeVar, cast

import jax
import optax

from cyxjax.config.sections import OPTAX, OPTAX_CONTRIB, TOLD_THE_LOSS, OptimizerConfig
from cyxjax.core.makers import maker_of
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError
from cyxjax.plugins import called, named

Rate = float | Callable[[Any], Any]
"""A learning rate, or a schedule: optimizer steps done -> learning rate (optax's, or your own)."""
_Make = TypeVar("_Make", bound=Callable[..., "Optimizer"])


class Optimizer(optax.GradientTransformation):
    """An optax transformation with `lr`, its peak learning rate. Any other optax transformation works too."""

    made_with: Mapping[str, Any] = MappingProxyType({})  # the name and arguments of the function that made it
    remade: Any = None  # (lr=, weight_decay=) -> a copy with these numbers; raises if it has groups
    is_frozen: Callable[[str], bool] | None = None  # name of a parameter -> whether it is not trained
    ddp: Any = None  # the wrapped model whose parameters it was given, as in torch
    made_lr: Any = None  # the rate it was made with: a number, a schedule, or None if not known
    rate_factor: float = 1.0  # what an update is multiplied by, since `lr` was set
    scaled: Any = None  # whose updates are multiplied, if not its own, which are 0: a copy with rate 1
    in_trainer: Any = None  # what a trainer compiles: itself, or a copy with the rate that was set before
    groups: Mapping[Any, "Optimizer"] = MappingProxyType({})  # label -> the rule of a group of parameters
    labels: Any = None  # (params) -> a tree of these labels
    _lr: Any = None

    @property
    def lr(self) -> Any:
        """The learning rate: a number, a schedule, or None if it is not known.

        In a hand-written loop, a new value takes effect at the next `step()`; all ranks must set the same,
        also after `ddp.load_state_dict`: a rate that was set is not part of a saved state.
        Raises: ConfigError for the optimizer of a trainer; TypeError for one made with a schedule.
        """
        return self._lr

    @lr.setter
    def lr(self, lr: Any) -> None:
        if self.in_trainer is not None:
            raise ConfigError(
                f"lr={lr!r} cannot be set: a trainer uses this optimizer, and its step is compiled with "
                f"{self._lr}. HINT: fit(..., schedule=lambda step: 0.9 ** (step // 100)), a factor for each "
                "step, or callbacks=[cx.ReduceLROnPlateau()]."
            )
        if self.made_lr == 0 and self.scaled is None:
            self.scaled = self.remade(lr=1.0)
        base = self.made_lr if self.scaled is None else 1.0
        self.rate_factor, self._lr = float(lr) / base, float(lr)

    @property
    def param_groups(self) -> list["ParamGroup"]:
        """torch's list, `for group in optimizer.param_groups: group["lr"] = 0.1`: the groups in the order of
        `with_groups`, then the other parameters; without groups, all parameters.
        """
        return [ParamGroup(self, rule) for rule in self.groups.values()] or [ParamGroup(self, self)]

    def factors(self, params: PyTree) -> PyTree:
        """What the updates of each parameter are multiplied by, since rates were set: a number or a tree."""
        if all(rule.rate_factor == 1 for rule in self.groups.values()):
            return self.rate_factor
        return jax.tree.map(
            lambda label: self.groups[label].rate_factor * self.rate_factor, self.labels(params)
        )

    def step(self) -> None:
        """Calls `update_parameters(self)` of the ddp it was made with. Raises: ConfigError without one."""
        self._bound("update_parameters(optimizer)").update_parameters(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `zero_grad()` of the ddp it was made with. Raises: ConfigError without one."""
        self._bound("zero_grad()").zero_grad(set_to_none)

    def _bound(self, call: str) -> Any:
        if self.ddp is None:
            raise ConfigError(
                f"this optimizer has no model. HINT: call ddp.{call}, or use cx.AdamOptimizer(ddp, lr=0.001)."
            )
        return self.ddp


class ParamGroup(MutableMapping[str, Any]):
    """A group of parameters as in torch: `lr`, which can be set as `Optimizer.lr`, and `initial_lr`."""

    def __init__(self, whole: Optimizer, rule: Optimizer):
        self._whole, self._rule = whole, rule

    def __getitem__(self, key: str) -> Any:
        if key == "initial_lr":
            return self._rule.made_lr
        if key != "lr":
            raise KeyError(key)
        return self._rule.lr if self._scale == 1 else self._rule.lr * self._scale

    def __setitem__(self, key: str, lr: Any) -> None:
        """Raises: KeyError for another key; otherwise as `Optimizer.lr`."""
        if key != "lr":
            raise KeyError(key)
        self._rule.lr = lr if self._scale == 1 else lr / self._scale

    def __delitem__(self, key: str) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("lr", "initial_lr"))

    def __len__(self) -> int:
        return 2

    @property
    def _scale(self) -> float:
        """What setting `Optimizer.lr` multiplied the rates of all groups by."""
        return 1.0 if self._whole is self._rule else self._whole.rate_factor


def named_rate(transformation: optax.GradientTransformation, lr: Any) -> Optimizer:
    """`transformation` as an `Optimizer` with the rate `lr`."""
    optimizer = Optimizer(transformation.init, transformation.update)
    optimizer.made_lr = optimizer._lr = lr
    return optimizer


# ---- torch's names ----------------------------------------------------------------------------------------


def _remembering(make: _Make) -> _Make:
    """`make`, whose optimizers can be made again with different numbers."""
    takes = signature(make)

    @wraps(make)
    def made(*args: Any, **given: Any) -> Optimizer:
        ddp, args = _owner(make.__name__, args, given)
        bound = takes.bind(*args, **given)
        bound.apply_defaults()
        values, lr = bound.arguments, bound.arguments["lr"]
        values["lr"] = lr if callable(lr) else float(lr)
        optimizer = make(**values)
        optimizer.ddp = ddp
        optimizer.remade = lambda **changes: made(**(values | changes))
        optimizer.made_with = {"name": make.__name__, **values}
        return optimizer

    return cast("_Make", made)


def _owner(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """(the wrapped model whose parameters come first, the other arguments): torch's order of arguments."""
    first = args[0] if args else given.pop("params", None)
    is_iterator = hasattr(first, "__next__")  # no tree of arrays: torch's model.parameters()
    ddp = first if hasattr(first, "made") else None if is_iterator else maker_of(first)
    if ddp is not None:
        return ddp, args[1:]
    if first is not None and "lr" in given:
        raise ConfigError(
            f"{name} was given a {type(first).__name__} before its learning rate. HINT: {name}(0.001), as "
            f"the trainer or ddp.update_parameters(optimizer) knows the parameters; or {name}(ddp, lr=0.001)."
        )
    return None, args


def _with_l2(weight_decay: float, transformation: optax.GradientTransformation) -> Any:
    """torch's `weight_decay` outside AdamW: an L2 term of the gradient, before the rule sees it."""
    if not weight_decay:
        return transformation
    return optax.chain(optax.add_decayed_weights(weight_decay), transformation)


@_remembering
def SGDOptimizer(
    lr: Rate = 0.01, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """v = momentum * v + g; p -= lr * v. Source: torch.optim.SGD (dampening 0)."""
    return named_rate(_with_l2(weight_decay, optax.sgd(lr, momentum or None, nesterov)), lr)


@_remembering
def MomentumOptimizer(lr: Rate = 0.01, momentum: float = 0.9, nesterov: bool = False) -> Optimizer:
    """SGD with momentum."""
    return SGDOptimizer(lr, momentum, nesterov)


@_remembering
def AdamOptimizer(
    lr: Rate = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Source: Kingma and Ba 2015, arXiv:1412.6980; defaults as torch.optim.Adam."""
    return named_rate(_with_l2(weight_decay, optax.adam(lr, *betas, eps=eps)), lr)


@_remembering
def AdamWOptimizer(
    lr: Rate = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled decay. Source: Loshchilov and Hutter 2019, arXiv:1711.05101."""
    return named_rate(optax.adamw(lr, *betas, eps=eps, weight_decay=weight_decay), lr)


@_remembering
def RMSPropOptimizer(
    lr: Rate = 0.01, decay: float = 0.99, eps: float = 1e-8, momentum: float = 0.0
) -> Optimizer:
    """Defaults as torch.optim.RMSprop, eps outside the root. Momentum sums updates times rates (optax)."""
    return named_rate(optax.rmsprop(lr, decay, eps, momentum=momentum or None, eps_in_sqrt=False), lr)


@_remembering
def AdaGradOptimizer(lr: Rate = 0.01, eps: float = 1e-10) -> Optimizer:
    """Source: Duchi, Hazan and Singer 2011; accumulators start at 0; eps is in the root (torch: outside)."""
    return named_rate(optax.adagrad(lr, initial_accumulator_value=0.0, eps=eps), lr)


# ---- names of a configuration file ------------------------------------------------------------------------


def build_optimizer(section: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer that an experiment's `optimizer` section describes, without groups; with `lr` if known.

    Raises: ConfigError whose key is below `optimizer`, for an argument that the rule does not take.
    """
    made: Any = _built(section)
    if not hasattr(made, "lr"):
        return made
    rated = named_rate(made, made.lr)
    rated.is_frozen = getattr(made, "is_frozen", None)
    rated.remade = lambda **changes: _built(section.model_copy(update=changes))
    return rated


def _built(section: OptimizerConfig) -> optax.GradientTransformation:
    if section.name in _OURS:
        rule, given = _OURS[section.name](section)
        decay = 0.0 if section.name in _DECOUPLED else section.weight_decay
        made = _called(section, rule, **given, learning_rate=section.lr)
        return named_rate(_with_l2(decay, made), section.lr)
    known = {name: getattr(optax, name) for name in (*OPTAX, *TOLD_THE_LOSS)}
    if section.name in OPTAX_CONTRIB:  # imported only if it is used
        known[section.name] = getattr(import_module("optax.contrib"), section.name)
    found = named("optimizer", section.name, known)
    given = {key: getattr(section, key) for key in section.model_fields_set - {"name", "options", "groups"}}
    if isinstance(found, optax.GradientTransformation):
        if given or section.options:
            raise ConfigError(
                f"optimizer {section.name!r} is an optimizer already and takes no options. HINT: "
                "name a function that creates one.",
                key="optimizer.name",
            )
        return found
    if "betas" in given:
        given["b1"], given["b2"] = given.pop("betas")
    rate = next((name for name in _RATES if name in signature(found).parameters), None)
    if rate is not None:
        given = {key: value for key, value in given.items() if key != "lr"} | {rate: section.lr}
    made = _called(section, found, **given)
    return made if rate is None or hasattr(made, "lr") else named_rate(made, section.lr)


def _called(section: OptimizerConfig, rule: Callable, **given: Any) -> Any:
    return called(f"optimizer {section.name!r}", rule, section.options, "options", own=_RATES, **given)


_RATES = ("learning_rate", "lr")
_DECOUPLED = ("adamw", "lamb", "lion")
# name -> (optax's rule, its arguments from the keys of the section)
_OURS: dict[str, Callable[[OptimizerConfig], tuple[Callable, dict[str, Any]]]] = {
    "sgd": lambda s: (optax.sgd, {}),
    "momentum": lambda s: (optax.sgd, {"momentum": s.momentum or None, "nesterov": s.nesterov}),
    "adam": lambda s: (optax.adam, _moments(s)),
    "adamw": lambda s: (optax.adamw, _moments(s) | {"weight_decay": s.weight_decay}),
    "lamb": lambda s: (optax.lamb, _moments(s) | {"weight_decay": s.weight_decay}),
    "lion": lambda s: (optax.lion, {"b1": s.betas[0], "b2": s.betas[1], "weight_decay": s.weight_decay}),
    "adagrad": lambda s: (optax.adagrad, {"initial_accumulator_value": 0.0, "eps": s.eps}),
    "rmsprop": lambda s: (
        optax.rmsprop,
        {"decay": 0.99, "eps": s.eps, "momentum": s.momentum or None, "eps_in_sqrt": False},
    ),
}


def _moments(section: OptimizerConfig) -> dict[str, Any]:
    return {"b1": section.betas[0], "b2": section.betas[1], "eps": section.eps}
