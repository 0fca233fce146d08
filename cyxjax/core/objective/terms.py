"""Several losses of one step: their factors, the parameters that each trains, and the optimizers of those.

A mean that weighs its samples itself divides by a sum that only the whole global batch knows. So losses that
share a mean and the parameters they reach are added up and pulled back once, as one `share`; each other one
apart, by the same forward pass. What a share does not train keeps no gradient of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from cyxjax.core.losses import batch_mean
from cyxjax.core.model.model_fns import Sown
from cyxjax.core.rows import Weighed, num_rows, weighed
from cyxjax.core.trees import PyTree, matches, path_name
from cyxjax.errors import ConfigError, DataError

Route: TypeAlias = "tuple[str, ...] | None"
"""Patterns of the parameters that a loss reaches; None: all of them."""


@dataclass(frozen=True, eq=False)
class Term:
    """One of the losses of a `cx.Task`, and the parameters that it alone trains.

    trains: a pattern of names ("generator/*"), or several; its gradient goes there and nowhere else. None:
    everywhere. optimizer: what moves them, with a state of its own; None: the trainer's. They move in the
    steps s (0, 1, ...) where s % every == offset, and rest with their optimizer in the others.
    Raises: ConfigError for an optimizer or a turn without parameters of its own, and a turn that never comes.
    """

    loss: Any
    factor: float = 1.0
    trains: str | Sequence[str] | None = None
    optimizer: Any = None
    every: int = 1
    offset: int = 0
    name: str = field(default="loss", kw_only=True)

    def __post_init__(self) -> None:
        is_plain = self.optimizer is None and (self.every, self.offset) == (1, 0)
        if not (self.trains or is_plain) or not 0 <= self.offset < self.every:
            raise ConfigError(
                f"a Term with trains={self.trains!r}, every={self.every}, offset={self.offset}: an optimizer "
                "or a turn is of the parameters that it `trains`, and 0 <= offset < every. HINT: "
                "Term(loss, trains='generator/*', optimizer=..., every=2, offset=1)."
            )

    @property
    def route(self) -> Route:
        if self.trains is None:
            return None
        return (self.trains,) if isinstance(self.trains, str) else tuple(self.trains)


@dataclass(frozen=True, eq=False)
class SumOfTerms:
    """Losses added up with their factors; each term's `loss` is a `PerExample`."""

    terms: tuple[Term, ...]

    def __call__(self, output: PyTree, target: PyTree) -> jax.Array:
        """float32 (B,): each row's losses with their factors; where a term weighs positions, their mean."""
        weight = jnp.ones(num_rows((output, target)))
        flat = flat_shares(shares_of(self, output, target, weight))
        return reduce(
            add, [w.values if w.weights is None else jnp.where(w.weights != 0, w.values, 0) for w in flat]
        )

    def batch_mean(self, output: PyTree, target: PyTree) -> jax.Array:
        """float32 (): the loss of these rows as a batch of their own."""
        if any(term.trains is not None for term in self.terms):
            raise DataError(
                "a Task whose terms train parameters of their own was given to a loop by hand, which has one "
                "backward for all. HINT: train it with cx.distributed.DistributedTrainer(model, task)."
            )
        return sum((t.factor * batch_mean(t.loss(output, target)) for t in self.terms), jnp.float32(0))


Shares: TypeAlias = "list[list[Weighed]]"
"""By route (`routes_of`) the means of its losses: first that over samples, then one for each that weighs."""


def terms_of(loss: Any) -> tuple[Term, ...]:
    return loss.terms if isinstance(loss, SumOfTerms) else (Term(loss),)


def num_means(loss: Any) -> int:
    """How many means besides that over samples `loss` may be made of: each term's own."""
    return len(loss.terms) if isinstance(loss, SumOfTerms) else 0


def routes_of(loss: Any) -> list[Route]:
    """The routes of the terms, each once, in their order."""
    return list(dict.fromkeys(term.route for term in terms_of(loss)))


def shares_of(loss: Any, output: PyTree, target: PyTree, weight: jax.Array) -> Shares:
    """The losses of one replica's rows. weight: of the rows, 0 for padding.

    What a model sows is added where there is one mean for all. Raises: DataError where there is not.
    """
    scored, own = (output.output, output.losses) if isinstance(output, Sown) else (output, None)
    shares: Shares = []
    for route in routes_of(loss):
        terms = [term for term in terms_of(loss) if term.route == route]
        found = [_of_term(term, scored, target, weight) for term in terms]
        plain, apart = ([one for one in found if (one.weights is None) is same] for same in (True, False))
        together = [Weighed(reduce(add, [one.values for one in plain]), None)] if plain else []
        shares.append([*together, *apart])
    return shares if own is None else _with_own(shares, own, loss)


def _of_term(term: Term, output: PyTree, target: PyTree, weight: jax.Array) -> Weighed:
    one = weighed(term.loss, output, target, weight)
    assert one is not None
    return one if term.factor == 1.0 else one._replace(values=term.factor * one.values)


def _with_own(shares: Shares, own: jax.Array, loss: Any) -> Shares:
    """With what the model itself adds to each row's loss."""
    first, *others = shares[0]
    if len(shares) > 1 or (first.weights is not None and not isinstance(loss, SumOfTerms)):
        raise DataError(
            "the model sows losses, one a sample, and the trainer's loss weighs its samples, or its terms "
            "train parameters of their own. HINT: return them with the output, as a term of a cx.Task."
        )
    if first.weights is None:
        return [[Weighed(first.values + own, None), *others]]
    return [[Weighed(own, None), first, *others]]


def flat_shares(shares: Shares) -> list[Weighed]:
    return [one for found in shares for one in found]


def reached(grads: PyTree, route: Route, routes: list[Route]) -> PyTree:
    """`grads` with None for what a loss does not train; what none does stays with the first."""

    def kept(path: Any, leaf: jax.Array) -> jax.Array | None:
        name = path_name(path)
        owners = [one for one in routes if one is None or matches(name, one)]
        return leaf if route in (owners or routes[:1]) else None

    return grads if routes == [None] else jax.tree_util.tree_map_with_path(kept, grads)
