"""What moves the parameters of a run: one optimizer, or one for each group of a task's terms."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from cyxjax.core.losses import PerExample
from cyxjax.core.objective.terms import Term, terms_of
from cyxjax.core.strategy import Sync, with_value
from cyxjax.core.trees import leaf_names, matches
from cyxjax.errors import ConfigError, nearest
from cyxjax.sync.in_groups import in_groups, in_turn
from cyxjax.train.rates.optimizer import for_trainer

PyTree = Any
_MADE = "cx.AdamOptimizer(0.001), or any of optax, called"


class Mover(NamedTuple):
    """An optimizer, when it steps, and the terms of whose parameters."""

    optimizer: optax.GradientTransformation
    every: int
    offset: int
    terms: list[Term]

    @property
    def name(self) -> str:
        return self.terms[0].name

    def moves(self, leaf: str) -> bool:
        """Whether one of its terms reaches the parameter of this name."""
        return any(term.route is None or matches(leaf, term.route) for term in self.terms)


def movers_of(loss: PerExample, optimizer: Any) -> list[Mover]:
    """One for each optimizer and turn among the loss's terms. optimizer: of terms that have none.

    Raises: ConfigError where there is none for some, what is none, or one that moves nothing.
    """
    if optimizer is not None and not wants_optimizer(loss):
        raise ConfigError(
            "the trainer's optimizer moves nothing: each term of the Task has one of its own. HINT: leave it "
            "out, or leave out one term's.",
            key="optimizer",
        )
    found: dict[tuple, Mover] = {}
    for term in terms_of(loss):
        rule = optimizer if term.optimizer is None else term.optimizer
        if rule is None:
            named = "" if len(terms_of(loss)) == 1 else f" for the term {term.name!r}"
            raise ConfigError(
                f"no optimizer was given{named}. HINT: pass cx.AdamOptimizer(0.001) as third argument"
                f"{', or Term(..., optimizer=...)' if named else ''}."
            )
        if not (callable(getattr(rule, "init", None)) and callable(getattr(rule, "update", None))):
            given = repr(rule) if isinstance(rule, str | float | int) else f"a {type(rule).__name__}"
            way = "pass its tx; the trainer keeps the state" if hasattr(rule, "tx") else _MADE
            raise ConfigError(f"{getattr(rule, '__name__', given)} is no optimizer. HINT: {way}.")
        rule = for_trainer(rule)
        key = (id(rule), term.every, term.offset)
        found.setdefault(key, Mover(rule, term.every, term.offset, [])).terms.append(term)
    return list(found.values())


def wants_optimizer(loss: PerExample) -> bool:
    """Whether one of its terms has none."""
    return any(term.optimizer is None for term in terms_of(loss))


def told_the_loss(movers: Sequence[Mover]) -> list[Mover]:
    """`movers` that are given the loss of a step; several are given none, for each has losses of its own."""
    if len(movers) > 1:
        return list(movers)
    return [mover._replace(optimizer=with_value(mover.optimizer)) for mover in movers]


def is_frozen(movers: Sequence[Mover]) -> Callable[[str], bool] | None:
    """Whether a parameter, by its name, is frozen by the groups of its optimizer; None if none has any."""
    rules = [(mover, rule) for mover in movers if (rule := getattr(mover.optimizer, "is_frozen", None))]
    return (lambda name: any(mover.moves(name) and rule(name) for mover, rule in rules)) if rules else None


def build_moved(
    movers: Sequence[Mover], make: Callable[[optax.GradientTransformation, Callable], Sync], shapes: Callable
) -> Sync:
    """The strategy of all movers. make: (optimizer, shapes of its parameters) -> a strategy.

    Raises: ConfigError for parameters that nothing moves, or two optimizers do.
    """
    if all(term.route is None for mover in movers for term in mover.terms):
        return make(movers[0].optimizer, shapes)
    params = shapes()
    owner = jax.tree.unflatten(jax.tree.structure(params), owners(movers, leaf_names(params)))
    syncs = {}
    for mover in movers:
        mine = jax.tree.map(lambda one, leaf, name=mover.name: leaf if one == name else None, owner, params)
        syncs[mover.name] = in_turn(make(mover.optimizer, lambda mine=mine: mine), mover.every, mover.offset)
    return in_groups(syncs, owner)


def owners(movers: Sequence[Mover], names: Sequence[str]) -> list[str]:
    """By parameter, the mover that moves it. Raises: ConfigError naming a parameter or a pattern."""
    for term in (term for mover in movers for term in mover.terms):
        for pattern in term.route or ():
            if not any(matches(name, (pattern,)) for name in names):
                raise ConfigError(
                    f"the term {term.name!r} trains {pattern!r}, which matches no parameter. "
                    f"HINT: {nearest(pattern, names)}"
                )
    return [_owner(movers, name) for name in names]


def _owner(movers: Sequence[Mover], name: str) -> str:
    found = [mover for mover in movers if mover.moves(name)]
    if not found:
        raise ConfigError(
            f"no term of the Task trains {name!r}: it would stay as it was drawn. HINT: name it in `trains` "
            "of one of them, or leave it out by the configuration's `trainable`."
        )
    if len(found) > 1:
        terms = " and ".join(repr(mover.name) for mover in found)
        raise ConfigError(
            f"the terms {terms} train {name!r} with optimizers or turns of their own. HINT: give these terms "
            "one optimizer object and one turn, or patterns that do not overlap."
        )
    return found[0].name
