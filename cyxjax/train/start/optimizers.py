"""Optimizers under torch-like names; each is an optax transformation that knows its learning rate."""

import math
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar, cast

import optax

from cyxjax.config.sections import OPTAX, OPTAX_CONTRIB, TOLD_THE_LOSS, OptimizerConfig
from cyxjax.core.makers import maker_of
from cyxjax.errors import ConfigError
from cyxjax.plugins import checked_options, named
from cyxjax.train.optimizer import Optimizer, Rate, named_rate

_Make = TypeVar("_Make", bound=Callable[..., Optimizer])


def _remembering(make: _Make) -> _Make:
    """`make`, whose optimizers can be made again with other numbers; its `lr` is checked."""
    takes = signature(make)

    @wraps(make)
    def made(*args: Any, **given: Any) -> Optimizer:
        ddp, args = _owner(make.__name__, args, given)
        bound = takes.bind(*args, **given)
        bound.apply_defaults()
        values = bound.arguments | {"lr": _checked_rate(bound.arguments["lr"])}
        _check_decays(make.__name__, values)
        optimizer = make(**values)
        optimizer.ddp = ddp

        def remade(**changes: Any) -> Optimizer:
            return made(**(values | changes))

        optimizer.remade = remade
        optimizer.made_with = {"name": make.__name__, **values}
        return optimizer

    return cast("_Make", made)


def _owner(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """(the wrapped model whose parameters come first, the other arguments): torch's order of arguments."""
    first = args[0] if args else given.pop("params", None)
    is_number = isinstance(first, float | int | str) or getattr(first, "shape", None) == ()
    if first is None or is_number or _is_schedule(first, given):
        return None, args
    ddp = first if hasattr(first, "made") else None if hasattr(first, "__next__") else maker_of(first)
    if ddp is None:
        raise ConfigError(
            f"{name} was given a {type(first).__name__} where its learning rate stands. HINT: {name}(0.001), "
            f"and the trainer or ddp.update_parameters(optimizer) knows them; or {name}(ddp, lr=0.001)."
        )
    return ddp, args[1:]


def _is_schedule(first: Any, given: Mapping[str, Any]) -> bool:
    """Whether `first` is a schedule, and no model that can be called too."""
    is_model = any(hasattr(first, name) for name in ("made", "apply", "parameters", "iter_modules"))
    return callable(first) and "lr" not in given and not is_model


def _checked_rate(lr: Any) -> Any:
    """A number above 0, or a schedule. Raises: ConfigError."""
    if callable(lr):
        return lr
    try:
        rate = float(lr)  # also of a text, as YAML reads 1e-3
    except (TypeError, ValueError):
        rate = 0.0
    if isinstance(lr, bool) or not 0 < rate < math.inf:
        raise ConfigError(
            f"lr={lr!r}: a learning rate is a positive number, or a schedule. HINT: 0.001 suits Adam."
        )
    return rate


_SHARES = ("b1", "b2", "b3", "betas", "momentum", "decay")  # what is kept of an average from step to step


def _check_decays(name: str, given: Mapping[str, Any]) -> None:
    """Raises: ConfigError for a decay of an average outside [0, 1), or one that is text."""
    for key in _SHARES:
        for value in given[key] if isinstance(given.get(key), tuple | list) else (given.get(key),):
            if isinstance(value, str | bool) or (isinstance(value, int | float) and not 0 <= value < 1):
                raise ConfigError(
                    f"{name}: {key}={given[key]!r} is no share of an average, in [0, 1). "
                    "HINT: 0.9, or 0.999 for b2.",
                    key=f"options.{key}",
                )


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
    """Defaults as torch.optim.RMSprop; eps is added outside the root, as there."""
    return named_rate(optax.rmsprop(lr, decay, eps, momentum=momentum or None, eps_in_sqrt=False), lr)


@_remembering
def AdaGradOptimizer(lr: Rate = 0.01, eps: float = 1e-10) -> Optimizer:
    """Source: Duchi, Hazan and Singer 2011; accumulators start at 0, as in torch.optim.Adagrad."""
    return named_rate(optax.adagrad(lr, initial_accumulator_value=0.0, eps=eps), lr)


def build_optimizer(section: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer an experiment's `optimizer` section describes, but for its groups; with `lr` where known.

    Raises: ConfigError whose key is below `optimizer`, for an argument that the rule does not take.
    """
    made = _built(section)
    known = hasattr(made, "lr")

    def remade(**changes: Any) -> Any:
        return _built(section.model_copy(update=changes))

    if not known:
        return made
    made = named_rate(made, getattr(made, "lr", None))
    made.remade = remade
    return made


def _built(section: OptimizerConfig) -> optax.GradientTransformation:
    if section.name in _OURS:
        rule, given = _OURS[section.name](section)
        given |= _accepted(section, rule, section.options)
        _check_decays(section.name, given)
        decay = 0.0 if section.name in _DECOUPLED else section.weight_decay
        return named_rate(_with_l2(decay, rule(section.lr, **given)), section.lr)
    known = {name: getattr(optax, name) for name in (*OPTAX, *TOLD_THE_LOSS)}
    if section.name in OPTAX_CONTRIB:  # loaded where it is asked for alone
        known[section.name] = getattr(import_module("optax.contrib"), section.name)
    found = named("optimizer", section.name, known)
    if isinstance(found, optax.GradientTransformation) and section.model_fields_set <= {"name", "groups"}:
        return found
    if not callable(found):
        raise ConfigError(
            f"optimizer {section.name!r} is made already and takes no arguments, "
            f"{sorted(section.model_fields_set - {'name', 'groups'})} are given. HINT: name a function.",
            key="name",
        )
    return _called(section, found)


_DECOUPLED = ("adamw", "lamb", "lion")
# name -> (optax's rule, its arguments from the keys of the section)
_OURS: dict[str, Callable[[OptimizerConfig], tuple[Callable, dict[str, Any]]]] = {
    "sgd": lambda s: (optax.sgd, {}),
    "momentum": lambda s: (optax.sgd, {"momentum": s.momentum or None, "nesterov": s.nesterov}),
    "adam": lambda s: (optax.adam, _moments(s)),
    "adamw": lambda s: (optax.adamw, _moments(s) | {"weight_decay": s.weight_decay}),
    "lamb": lambda s: (optax.lamb, _moments(s) | {"weight_decay": s.weight_decay}),
    "lion": lambda s: (optax.lion, {"b1": s.betas[0], "b2": s.betas[1], "weight_decay": s.weight_decay}),
    "adagrad": lambda s: (optax.adagrad, {"eps": s.eps}),
    "rmsprop": lambda s: (
        optax.rmsprop,
        {"decay": 0.99, "eps": s.eps, "momentum": s.momentum or None, "eps_in_sqrt": False},
    ),
}


def _moments(section: OptimizerConfig) -> dict[str, Any]:
    return {"b1": section.betas[0], "b2": section.betas[1], "eps": section.eps}


def _called(section: OptimizerConfig, rule: Callable) -> optax.GradientTransformation:
    """`rule` called with the keys that were given; other arguments keep the defaults of `rule`."""
    takes = signature(rule).parameters
    rate = next((name for name in _RATES if name in takes), None)
    given: dict[str, Any] = {}
    for key in sorted(section.model_fields_set - {"name", "options", "groups", *(("lr",) if rate else ())}):
        value = getattr(section, key)
        own = dict(zip(("b1", "b2"), value, strict=True)) if key == "betas" else {key: value}
        if not own.keys() <= takes.keys():
            raise ConfigError(
                f"optimizer {section.name!r} takes no {key}. HINT: what it takes is given in options: "
                f"{', '.join(name for name in takes if name not in _RATES) or 'nothing'}.",
                key=key,
            )
        given |= own
    given |= _accepted(section, rule, section.options) | ({rate: section.lr} if rate else {})
    if section.name in OPTAX:
        _check_decays(section.name, given)
    try:
        made = rule(**given)
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"optimizer {section.name!r} with {given}: {type(err).__name__}: {err} HINT: see its own help.",
            key="options",
        ) from err
    if not hasattr(made, "init") or not hasattr(made, "update"):
        raise ConfigError(
            f"optimizer {section.name!r} gave a {type(made).__name__}. HINT: return an optax transformation.",
            key="name",
        )
    return made if rate is None or hasattr(made, "lr") else named_rate(made, section.lr)


_RATES = ("learning_rate", "lr")


def _accepted(section: OptimizerConfig, rule: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """`options`, each of which `rule` takes. Raises: ConfigError."""
    for option in options.keys() & set(_RATES):
        raise ConfigError(
            f"optimizer {section.name!r}: {option!r} is optimizer.lr. HINT: write lr", key=f"options.{option}"
        )
    return checked_options(f"optimizer {section.name!r}", rule, options, "options", own=_RATES)
