"""The value that a loss or metric has for each sample of a batch, and its weight in a mean.

A mean over the global batch is sum(weight * value) / sum(weight) over all replicas' samples, whatever replica
and micro-batch they lie in. Padding weighs nothing; so does a token that is masked out.

A loss of one number is used as that number where the rows at hand are the whole batch (`whole_batch`); where
the batch is split it is taken row by row, and `core/objective/split_check.py` compares the two.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.model.model_fns import Sown
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree, kind_of
from cyxjax.errors import ConfigError, CyxjaxError, DataError

_is_whole: ContextVar[bool] = ContextVar("rows_are_the_whole_batch", default=False)
WAYS_OUT = (
    "return one value per sample, shape (B,), that depends on this sample alone; or the pair "
    "(values, weights) without the division; or wrap a loss that compares samples, cx.GlobalLoss(loss)"
)


def whole_batch(is_whole: bool = True) -> AbstractContextManager[None]:
    """The rows of what is traced inside are the step's global batch, without padding, if `is_whole`."""
    return holding(_is_whole, is_whole)


def is_whole_batch() -> bool:
    """Whether the given rows are the global batch."""
    return _is_whole.get()


class Weighed(NamedTuple):
    """A value for each row of a batch."""

    values: jax.Array  # float32 (B,)
    weights: jax.Array | None  # float32 (B,), padding 0; None: each row weighs what its sample does

    def pair(self, weight: jax.Array) -> jax.Array:
        """float32 (2,): (weighted sum, sum of weights). weight: of the rows, 0 for padding."""
        w = weight if self.weights is None else self.weights
        # `where`, not a product: what a padding row holds may be NaN, and 0 * NaN is NaN.
        return jnp.stack([jnp.where(w != 0, self.values, 0) @ w, w.sum()])


Losses: TypeAlias = "list[Weighed] | Weighed | jax.Array"
"""What a loss says of the rows: the means that are added up, or one, or its values (B,)."""


def loss_rows(losses: Losses, weight: jax.Array, count: int) -> jax.Array:
    """float32 (count, 2): the mean over samples, or the only one, and the others below; zeros after them."""
    found = losses if isinstance(losses, list) else [losses]
    each = [one if isinstance(one, Weighed) else Weighed(one, None) for one in found]
    apart = [one.pair(weight) for one in each if one.weights is not None and count > 1]
    first = [one for one in each if one.weights is None or count == 1]
    none = Weighed(jnp.zeros(weight.shape, jnp.float32), None)
    total = reduce(lambda a, b: Weighed(a.values + b.values, None), first) if first else none
    rows = jnp.stack([total.pair(weight), *apart])
    return jnp.pad(rows, ((0, count - len(rows)), (0, 0)))


def weighed(
    measure: Any, output: PyTree, target: PyTree, weight: jax.Array, name: str = "the loss"
) -> Weighed | None:
    """What `measure`, a loss or a metric, gives for the rows; None where it has no meaning.

    measure: gives values (B,), (values, weights) of shape (B, ...) each, or one number for all rows; or has
    `of_rows(output, target, weight) -> Weighed`, for one that looks at more than a sample at a time.
    """
    output = output.output if isinstance(output, Sown) else output
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
    """Returns for what a loss or metric of `batch` samples may be: one number, or a row per sample, or two.

    what: names it. Raises: DataError saying what it is instead.
    """
    pair = given if isinstance(given, tuple) else (given,)
    shapes = [getattr(one, "shape", None) for one in pair]
    rows = shapes[0] is not None and shapes[0][:1] == (batch,)
    if not (shapes == [()] or rows and len(pair) <= 2 and shapes[0] == shapes[-1]):
        raise DataError(
            f"{what} of {batch} samples gave {', '.join(map(kind_of, pair))}; expected a value per sample, "
            f"shape ({batch}, ...), with or without weights of the same shape, or one number. HINT: return "
            "the values alone (cx.Metrics measures other things), as by .reshape(len(target), -1).mean(1)."
        )
    if any(jnp.iscomplexobj(one) for one in pair):
        raise DataError(
            f"{what} of {batch} samples gave {', '.join(map(kind_of, pair))}; expected a real number. HINT: "
            "return jnp.abs(values), or values.real."
        )


def row_by_row(measure: Callable, output: PyTree, target: PyTree) -> Any:
    """What `measure` gives for each row as a batch of its own, (B, ...) for an array; leaves without rows go
    to each. Raises: ConfigError for a measure that cannot be called on one row.
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
            f"a loss or metric takes a batch and not one sample alone ({type(err).__name__}: {what}); where "
            "the batch is split over replicas, micro-batches or parts, it must be made of values of single "
            f"samples. HINT: {WAYS_OUT}."
        ) from err


def num_rows(tree: PyTree) -> int:
    """Of its first leaf that has any; 0 where none has."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(tree) if leaf.ndim), 0)


def mean_of_each(values: jax.Array) -> jax.Array:
    """(B, ...) -> (B,): the mean over all but the first dimension, in float32."""
    return values.astype(jnp.float32).reshape(values.shape[0], -1).mean(1)


def by_sample(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(B, ...) values and their weights as one of each a sample, float32 (B,): its weighted mean, its weight.

    No gradient goes through weights. Where they are 0, values may be anything.
    """
    v = values.astype(jnp.float32).reshape(values.shape[0], -1)
    w = lax.stop_gradient(weights).astype(jnp.float32).reshape(v.shape)
    total = w.sum(1)
    return jnp.where(w != 0, v * w, 0.0).sum(1) / jnp.where(total != 0, total, 1.0), total
