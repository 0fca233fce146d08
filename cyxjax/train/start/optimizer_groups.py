"""Optimizer groups of a run: one optimizer for all parameters, or one for each group of a task's terms; and
one optimizer with groups of parameters, each with settings of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import optax

from cyxjax.config.sections import GroupConfig
from cyxjax.core.losses import PerExample
from cyxjax.core.objective.terms import Term, terms_of
from cyxjax.core.strategy import Sync, with_value
from cyxjax.core.trees import PyTree, leaf_names, matches
from cyxjax.errors import ConfigError, nearest
from cyxjax.sync.in_groups import in_groups, in_turn, part_of
from cyxjax.train.start.optimizers import Optimizer, named_rate


class OptimizerGroup(NamedTuple):
    """An optimizer, the steps in which it acts, and the terms whose parameters it updates."""

    optimizer: optax.GradientTransformation
    every: int
    offset: int
    terms: list[Term]

    @property
    def name(self) -> str:
        return self.terms[0].name

    def trains(self, leaf: str) -> bool:
        """Whether one of its terms reaches the parameter of this name."""
        return any(term.route is None or matches(leaf, term.route) for term in self.terms)


def for_trainer(optimizer: Any) -> Any:
    """`optimizer` at the rate that was set, the same at each call, with `lr` now fixed; others unchanged."""
    if not isinstance(optimizer, Optimizer):
        return optimizer
    if optimizer.in_trainer is None:
        of_groups = any(rule.lr != rule.made_lr for rule in optimizer.groups.values())
        is_changed = of_groups or optimizer.lr != optimizer.made_lr
        optimizer.in_trainer = optimizer.remade(lr=optimizer.lr) if is_changed else optimizer
        for rule in optimizer.groups.values():
            rule.in_trainer = rule
    return optimizer.in_trainer


def groups_of(loss: PerExample, optimizer: Any) -> list[OptimizerGroup]:
    """A group for each optimizer and turn among the loss's terms. optimizer: for terms without their own.

    Raises: ConfigError for an object that is not an optimizer.
    """
    found: dict[tuple, OptimizerGroup] = {}
    for term in terms_of(loss):
        rule = optimizer if term.optimizer is None else term.optimizer
        if not (callable(getattr(rule, "init", None)) and callable(getattr(rule, "update", None))):
            raise ConfigError(
                f"the optimizer of {term.name!r} is {rule!r:.80}, expected an optax transformation. HINT: "
                "pass cx.AdamOptimizer(0.001) as third argument, or Term(..., optimizer=optax.adam(0.001))."
            )
        rule = for_trainer(rule)
        key = (id(rule), term.every, term.offset)
        found.setdefault(key, OptimizerGroup(rule, term.every, term.offset, [])).terms.append(term)
    return list(found.values())


def wants_optimizer(loss: PerExample) -> bool:
    """Whether one of its terms has no optimizer."""
    return any(term.optimizer is None for term in terms_of(loss))


def with_loss_value(groups: Sequence[OptimizerGroup]) -> list[OptimizerGroup]:
    """`groups` whose optimizer receives the loss of a step; several groups have losses of their own, and
    receive none."""
    if len(groups) > 1:
        return list(groups)
    return [group._replace(optimizer=with_value(group.optimizer)) for group in groups]


def is_frozen(groups: Sequence[OptimizerGroup]) -> Callable[[str], bool] | None:
    """Whether a parameter, by its name, is frozen by the groups of its optimizer; None if none has any."""
    rules = [(group, rule) for group in groups if (rule := getattr(group.optimizer, "is_frozen", None))]
    return (lambda name: any(group.trains(name) and rule(name) for group, rule in rules)) if rules else None


def build_grouped(
    groups: Sequence[OptimizerGroup],
    make: Callable[[optax.GradientTransformation, Callable], Sync],
    shapes: Callable,
) -> Sync:
    """The strategy of all groups. make: (optimizer, shapes of its parameters) -> a strategy.

    Raises: ConfigError for parameters that no optimizer trains, or two do.
    """
    if all(term.route is None for group in groups for term in group.terms):
        return make(groups[0].optimizer, shapes)
    params = shapes()
    owner = jax.tree.unflatten(jax.tree.structure(params), owners(groups, leaf_names(params)))
    syncs = {}
    for group in groups:
        mine = part_of(params, owner, group.name)
        syncs[group.name] = in_turn(make(group.optimizer, lambda mine=mine: mine), group.every, group.offset)
    return in_groups(syncs, owner)


def owners(groups: Sequence[OptimizerGroup], names: Sequence[str]) -> list[str]:
    """The group that trains each parameter. Raises: ConfigError naming a parameter or a pattern."""
    for term in (term for group in groups for term in group.terms):
        for pattern in term.route or ():
            if not any(matches(name, (pattern,)) for name in names):
                raise ConfigError(
                    f"the term {term.name!r} trains {pattern!r}, which matches no parameter. "
                    f"HINT: {nearest(pattern, names)}"
                )
    return [_owner(groups, name) for name in names]


def _owner(groups: Sequence[OptimizerGroup], name: str) -> str:
    found = [group.name for group in groups if group.trains(name)]
    if len(found) != 1:
        raise ConfigError(
            f"{name!r} is trained by {' and '.join(map(repr, found)) or 'no term of the Task'}, expected one "
            "optimizer and turn. HINT: give `trains` patterns that cover each parameter once; the "
            "configuration's `trainable` excludes one."
        )
    return found[0]


# ---- groups of parameters ----------------------------------------------------------------------------------


def with_groups(optimizer: Any, groups: Sequence[Mapping[str, Any] | GroupConfig]) -> Optimizer:
    """`optimizer` with different settings for parameters whose name matches a group's pattern.

    Groups are, for example, {"match": "encoder/*", "lr": 1e-4}, {"match": "*/bias", "weight_decay": 0.0} and
    {"match": "embed/*", "frozen": True}. The first match applies, of frozen groups before the others; names
    are those of checkpoints (`Dense_0/kernel`). A factor, such as `schedule` of `fit`, scales all rates
    equally. A group's own `lr` or `weight_decay` needs an optimizer of cyxjax that takes it, and a rate of
    its own an optimizer whose rate is a number.
    Raises: ValueError for an unknown key; ConfigError if the optimizer does not take a group's numbers and,
        before training, for a group without parameters.
    """
    made = [GroupConfig.model_validate(group) for group in groups]
    rule = for_trainer(optimizer)  # at the rate that was set
    rules: dict[Any, Any] = {str(n): _rule_of(rule, group, f"groups.{n}") for n, group in enumerate(made)}
    rules[""] = _own(rule)
    frozen_first = sorted(enumerate(made), key=lambda pair: not pair[1].frozen)

    def group_of(name: str) -> str:
        return next((str(n) for n, group in frozen_first if fnmatchcase(name, group.match)), "")

    def labels(params: PyTree) -> PyTree:
        names = leaf_names(params)
        found = [group_of(name) for name in names]
        for n, group in enumerate(made):
            if str(n) not in found:
                raise ConfigError(
                    f"group {group.match!r} has no parameter: no name matches, or all that match are in an "
                    f"earlier or a frozen group. HINT: {nearest(group.match, names)}",
                    key=f"optimizer.groups.{n}",
                )
        return jax.tree.unflatten(jax.tree.structure(params), found)

    result = named_rate(optax.multi_transform(rules, labels), getattr(rule, "lr", None))
    result.groups, result.labels, result.remade = rules, labels, _has_groups
    result.ddp = getattr(optimizer, "ddp", None)
    if any(group.frozen for group in made):
        result.is_frozen = lambda name: bool(label := group_of(name)) and made[int(label)].frozen
        if result.ddp is not None:
            result.ddp.is_frozen = result.is_frozen
    return result


def _own(rule: Any) -> Optimizer:
    """A copy of `rule` whose rate can be set apart from that of others."""
    copy = named_rate(rule, getattr(rule, "lr", None))
    copy.remade = _has_groups
    return copy


def _rule_of(optimizer: Any, group: GroupConfig, key: str) -> Optimizer:
    if group.frozen:
        return named_rate(optax.set_to_zero(), getattr(optimizer, "lr", None))
    numbers = {"lr": group.lr, "weight_decay": group.weight_decay}
    changes = {name: value for name, value in numbers.items() if value is not None}
    if group.lr is not None and callable(getattr(optimizer, "lr", None)):
        raise ConfigError(
            f"group {group.match!r} has the rate {group.lr}, and the optimizer's is a schedule, which would "
            "not apply to the group. HINT: give the optimizer a number; `schedule` of fit is a factor on the "
            "rates of all groups: fit(..., schedule=lambda step: 0.9 ** (step // 100)).",
            key=key,
        )
    try:
        return _own(optimizer.remade(**changes) if changes else optimizer)
    except (AttributeError, TypeError) as err:  # no `remade`, or not with these numbers
        raise ConfigError(
            f"group {group.match!r} sets {changes}, which the optimizer does not take for a group. HINT: use "
            "an optimizer of cyxjax that takes it, for example cx.AdamWOptimizer(0.001).",
            key=key,
        ) from err


def _has_groups(lr: float) -> Any:
    raise ConfigError(
        f"an optimizer with groups of parameters cannot be made again with lr={lr}. HINT: give its rate to "
        "the optimizer that is passed to with_groups, and a rate of its own to a group that has one."
    )
