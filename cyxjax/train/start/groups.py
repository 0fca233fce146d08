"""Parameter groups, selected by name: another learning rate, another weight decay, or frozen."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import optax
from pydantic import ValidationError

from cyxjax.config.errors import explain
from cyxjax.config.sections import GroupConfig
from cyxjax.core.trees import leaf_names, path_name
from cyxjax.errors import ConfigError, nearest
from cyxjax.train.optimizer import Optimizer, named_rate

PyTree = Any


def with_groups(optimizer: Any, groups: Sequence[Mapping[str, Any] | GroupConfig]) -> Optimizer:
    """`optimizer` with other settings for the parameters whose name matches a group's pattern.

    with_groups(cx.AdamWOptimizer(1e-3), [{"match": "encoder/*", "lr": 1e-4}, {"match": "*/bias",
    "weight_decay": 0.0}, {"match": "embed/*", "frozen": True}]). The first match counts; names are those of
    checkpoints (`Dense_0/kernel`). A schedule or a factor moves all rates alike.
    Raises: ConfigError for a group that says nothing, and for another rate of an optimizer that is not ours.
    """
    made = [_checked(group) for group in groups]
    rules: dict[Any, Any] = {"": optimizer} | {
        str(n): _rule_of(optimizer, group) for n, group in enumerate(made)
    }

    def labels(params: PyTree) -> PyTree:
        named = [_group_of(made, name) for name in leaf_names(params)]
        _check_matches(made, leaf_names(params), named)
        return jax.tree_util.tree_map_with_path(lambda path, _: _group_of(made, path_name(path)), params)

    parts = optax.multi_transform(rules, labels)
    result = named_rate(parts, getattr(optimizer, "lr", None))
    if any(group.frozen for group in made):
        result.is_frozen = lambda name: bool(label := _group_of(made, name)) and made[int(label)].frozen
    return result


def _checked(group: Mapping[str, Any] | GroupConfig) -> GroupConfig:
    try:
        found = group if isinstance(group, GroupConfig) else GroupConfig(**group)
    except ValidationError as err:
        raise ConfigError(explain(err, GroupConfig, f"group {dict(group)}")) from None
    if found.frozen == (found.lr is not None or found.weight_decay is not None):
        raise ConfigError(
            f"group {found.match!r} says {'frozen and more' if found.frozen else 'nothing'}. HINT: give lr, "
            "weight_decay or both, or frozen: true alone.",
            key="optimizer.groups",
        )
    return found


def _rule_of(optimizer: Any, group: GroupConfig) -> optax.GradientTransformation:
    if group.frozen:
        return optax.set_to_zero()
    remade: Callable[..., Any] | None = getattr(optimizer, "remade", None)
    if remade is None:
        raise ConfigError(
            f"group {group.match!r} gives other numbers to an optimizer that is not cyxjax's, and how to "
            "make it again is not known. HINT: optax.multi_transform({...}, labels), or cx.AdamOptimizer.",
            key="optimizer.groups",
        )
    changes = {"lr": group.lr, "weight_decay": group.weight_decay}
    return remade(**{name: value for name, value in changes.items() if value is not None})


def _group_of(groups: Sequence[GroupConfig], name: str) -> str:
    """The number of the first group that matches, as text; "" for none."""
    return next((str(n) for n, group in enumerate(groups) if fnmatchcase(name, group.match)), "")


def _check_matches(groups: Sequence[GroupConfig], names: Sequence[str], labels: Sequence[str]) -> None:
    for number, group in enumerate(groups):
        if str(number) not in labels:
            first = next((_group_of(groups, name) for name in names if fnmatchcase(name, group.match)), "")
            why, hint = "no parameter", nearest(group.match, names)
            if first:
                why = f"only names that the group {groups[int(first)].match!r} before it has"
                hint = "put it first; the first group that matches counts."
            raise ConfigError(
                f"group {group.match!r} matches {why}. HINT: {hint}", key=f"optimizer.groups.{number}"
            )
    if all(label and groups[int(label)].frozen for label in labels):
        raise ConfigError(
            "every parameter is frozen: nothing would be trained. HINT: leave one out of the patterns.",
            key="optimizer.groups",
        )
