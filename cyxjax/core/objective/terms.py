"""Several losses of one step: their factors, the parameters that each trains, and their optimizers.

A loss with weights of its own is divided by a sum over the whole global batch, which no replica knows yet. So
losses that share a mean and the parameters they train are added up and differentiated once, as one `share`;
every other loss is differentiated separately, through the same forward pass. Each share gives gradients only
to the parameters that it trains.
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
from cyxjax.core.rows import Weighed, weighed
from cyxjax.core.trees import PyTree, matches, path_name
from cyxjax.errors import ConfigError, DataError

Route: TypeAlias = "tuple[str, ...] | None"
"""Name patterns of the parameters that a loss trains; None: all parameters."""


@dataclass(frozen=True, eq=False)
class Term:
    """One of the losses of a `cx.Task`, and the parameters that it trains.

    trains: a pattern of parameter names ("generator/*"), or several; only these get its gradient. None: all
    parameters. optimizer: updates these parameters, with its own state; None: the trainer's. They change in
    the steps s (0, 1, ...) where s % every == offset; in others they and the optimizer's state stay as is.
    loss: not a Task of several terms.
    Raises: ConfigError for optimizer, every or offset without `trains`, and unless 0 <= offset < every.
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
                f"a Term with trains={self.trains!r}, every={self.every}, offset={self.offset}: optimizer, "
                "every and offset need `trains`, and 0 <= offset < every must hold. HINT: write "
                "Term(loss, trains='generator/*', optimizer=..., every=2, offset=1)."
            )
        if isinstance(self.loss, SumOfTerms):
            raise ConfigError(
                f"the term {self.name!r} is a Task with terms of its own. HINT: put them into the outer Task."
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

    def batch_mean(self, output: PyTree, target: PyTree) -> jax.Array:
        """float32 (): the loss of these rows as a batch of their own."""
        if any(term.trains is not None for term in self.terms):
            raise DataError(
                "a Task whose terms train separate parameters was given to a hand-written loop, which has "
                "one backward for all. HINT: train with cx.distributed.DistributedTrainer(model, task)."
            )
        return sum((t.factor * batch_mean(t.loss(output, target)) for t in self.terms), jnp.float32(0))


Shares: TypeAlias = "list[list[Weighed]]"
"""For each route (`routes_of`) its means: first the mean over samples, then one per loss with weights."""


def terms_of(loss: Any) -> tuple[Term, ...]:
    return loss.terms if isinstance(loss, SumOfTerms) else (Term(loss),)


def num_means(loss: Any) -> int:
    """How many means `loss` may have besides the mean over samples: one per term."""
    return len(loss.terms) if isinstance(loss, SumOfTerms) else 0


def routes_of(loss: Any) -> list[Route]:
    """The distinct routes of the terms, in order."""
    return list(dict.fromkeys(term.route for term in terms_of(loss)))


def shares_of(loss: Any, output: PyTree, target: PyTree, weight: jax.Array) -> Shares:
    """The losses of one replica's rows. weight: of the rows, 0 for padding.

    Losses that the model sows are added as a mean over samples. Raises: DataError if it sows any and terms
    train separate parameters, or a single loss has weights of its own.
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
    """`shares` with the losses that the model itself adds to each row."""
    first, *others = shares[0]
    if len(shares) > 1 or (first.weights is not None and not isinstance(loss, SumOfTerms)):
        raise DataError(
            "the model sows losses, one per sample, but the trainer's loss has weights of its own, or its "
            "terms train separate parameters. HINT: return them in the output, as a term of a cx.Task."
        )
    if first.weights is None:
        return [[Weighed(first.values + own, None), *others]]
    return [[Weighed(own, None), first, *others]]


def flat_shares(shares: Shares) -> list[Weighed]:
    return [one for found in shares for one in found]


def reached(grads: PyTree, route: Route, routes: list[Route]) -> PyTree:
    """`grads` with None for what a loss does not train; parameters of no route stay with the first."""

    def kept(path: Any, leaf: jax.Array) -> jax.Array | None:
        name = path_name(path)
        owners = [one for one in routes if one is None or matches(name, one)]
        return leaf if route in (owners or routes[:1]) else None

    return grads if routes == [None] else jax.tree_util.tree_map_with_path(kept, grads)
