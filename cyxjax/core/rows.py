"""The value that a loss or metric has for each sample of a batch, and its weight in a mean.

A mean over the global batch is sum(weight * value) / sum(weight) over the samples of all replicas and
micro-batches. Padding has zero weight; so does a token that is masked out.

A loss that returns one number is used directly where the given rows are the whole batch (`whole_batch`);
where the batch is split it is called for each row, and `core/objective/split_check.py` compares the two.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree, kind_of
from cyxjax.errors import ConfigError, CyxjaxError, DataError

_is_whole: ContextVar[bool] = ContextVar("rows_are_the_whole_batch", default=False)
WAYS_OUT = (
    "return one value per sample, shape (B,), that depends on this sample alone; or return the pair "
    "(values, weights) without dividing; or wrap a loss that compares samples: cx.GlobalLoss(loss)"
)


def whole_batch(is_whole: bool = True) -> AbstractContextManager[None]:
    """Declares that what is traced inside gets the whole global batch, without padding, if `is_whole`."""
    return holding(_is_whole, is_whole)


def is_whole_batch() -> bool:
    """Whether the given rows are the global batch."""
    return _is_whole.get()


class Weighed(NamedTuple):
    """A value for each row of a batch."""

    values: jax.Array  # float32 (B,)
    weights: jax.Array | None  # float32 (B,), padding 0; None: the weights of the samples

    def pair(self, weight: jax.Array) -> jax.Array:
        """float32 (2,): (weighted sum, sum of weights). weight: of the rows, 0 for padding."""
        w = weight if self.weights is None else self.weights
        # `where`, not a product: a padding row may hold NaN, and 0 * NaN is NaN.
        return jnp.stack([jnp.where(w != 0, self.values, 0) @ w, w.sum()])


Losses: TypeAlias = "list[Weighed] | jax.Array"
"""The result of a loss for some rows: means to be added up, or values (B,)."""


def loss_rows(losses: Losses, weight: jax.Array, count: int) -> jax.Array:
    """float32 (count, 2): first the mean over samples (or the only mean), then the others, then zeros.

    If there is no mean over samples, the first row counts the samples that have a weight in another.
    """
    each = losses if isinstance(losses, list) else [Weighed(losses, None)]
    apart = [one for one in each if one.weights is not None and count > 1]
    first = [one for one in each if one.weights is None or count == 1]
    if not first:
        none = jnp.zeros(weight.shape, jnp.float32)
        weights = sum([jnp.abs(one.weights) for one in apart if one.weights is not None], none)
        first = [Weighed(none, jnp.where(weights != 0, weight, 0.0))]
    total = reduce(lambda a, b: Weighed(a.values + b.values, None), first)
    rows = [one.pair(weight) for one in (total, *apart)]
    return jnp.stack(rows + [jnp.zeros(2)] * (count - len(rows)))


def weighed(
    measure: Any, output: PyTree, target: PyTree, weight: jax.Array, name: str = "the loss"
) -> Weighed | None:
    """The result of `measure`, a loss or a metric, for each row; None if `measure` returns None.

    measure: returns values (B,), (values, weights) of shape (B, ...) each, or one number for all rows; or has
    a method `of_rows(output, target, weight) -> Weighed`, if it uses more than one sample at a time.
    """
    of_rows = getattr(measure, "of_rows", None)
    given = measure(output, target) if of_rows is None else of_rows(output, target, weight)
    if given is None or isinstance(given, Weighed):
        return given
    check_form(given, len(weight), name)
    if isinstance(given, tuple):
        values, weights = by_sample(*given)
        return Weighed(values, jnp.where(weight > 0, weight * weights, 0.0))
    if given.ndim == 0 and not is_whole_batch():
        given = row_by_row(measure, output, target)
    values = mean_of_each(given) if given.ndim > 1 else given.astype(jnp.float32)
    return Weighed(jnp.broadcast_to(values, weight.shape), None)


def check_form(given: Any, batch: int, what: str = "the loss") -> None:
    """Checks that a loss or metric of `batch` samples is one number, values per sample, or (values, weights).

    what: its name for the message. Raises: DataError describing what it is instead.
    """
    pair = given if isinstance(given, tuple) else (given,)
    shapes = [getattr(one, "shape", None) for one in pair]
    rows = shapes[0] is not None and shapes[0][:1] == (batch,)
    if not (shapes == [()] or rows and len(pair) <= 2 and shapes[0] == shapes[-1]):
        raise DataError(
            f"{what} of {batch} samples returned {', '.join(map(kind_of, pair))}; expected a value per "
            f"sample, shape ({batch}, ...), with or without weights of that shape, or one number. HINT: "
            "return values.reshape(len(target), -1), or (values, weights) with both reshaped so, and nothing "
            "else (cx.Metrics measures more)."
        )
    if any(jnp.iscomplexobj(one) for one in pair):
        raise DataError(
            f"{what} of {batch} samples returned {', '.join(map(kind_of, pair))}; expected real numbers. "
            "HINT: return jnp.abs(values) or values.real."
        )


def row_by_row(measure: Callable, output: PyTree, target: PyTree) -> Any:
    """The results of `measure` for each row as a batch of one, stacked to (B, ...); leaves without rows are
    passed to every call. Raises: ConfigError for a measure that cannot be called on one row.
    """
    leaves, form = jax.tree.flatten((output, target))

    def of_row(row: list[jax.Array]) -> jax.Array:
        own = iter(row)
        return measure(*jax.tree.unflatten(form, [next(own)[None] if a.ndim else a for a in leaves]))

    try:
        return jax.vmap(of_row)([a for a in leaves if a.ndim])
    except CyxjaxError:
        raise
    except Exception as err:  # whatever a user's function raises
        what = " ".join(str(err).split())[:160]
        raise ConfigError(
            f"a loss or metric cannot be called on one sample ({type(err).__name__}: {what}); where "
            "the batch is split over replicas, micro-batches or parts, it must be a mean of per-sample "
            f"values. HINT: {WAYS_OUT}."
        ) from err


def num_rows(tree: PyTree) -> int:
    """Number of rows of the first leaf that has rows; 0 if no leaf has."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(tree) if leaf.ndim), 0)


def mean_of_each(values: jax.Array) -> jax.Array:
    """(B, ...) -> (B,): the mean over all but the first dimension, in float32."""
    return flat_rows(values).mean(1)


def flat_rows(values: jax.Array) -> jax.Array:
    """(B, ...) -> float32 (B, n), also for B = 0."""
    return values.astype(jnp.float32).reshape(len(values), math.prod(values.shape[1:]))


def by_sample(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weighted mean, total weight) of each sample, float32 (B,), from values and weights (B, ...).

    No gradient flows through weights. Where they are 0, values may be anything, NaN included.
    """
    v = flat_rows(values)
    w = lax.stop_gradient(weights).astype(jnp.float32).reshape(v.shape)
    total = w.sum(1)
    return jnp.where(w != 0, v * w, 0.0).sum(1) / jnp.where(total != 0, total, 1.0), total
