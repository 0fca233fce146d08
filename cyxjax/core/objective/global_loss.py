"""Losses over the whole global batch: a loss that compares samples sees the samples of all replicas.

Outputs, targets and weights are gathered over replicas, in the order that the samples have in the step, so
that the loss is the same function of the same rows for any number of replicas. Gradients stay LOCAL: each
replica differentiates with respect to its own outputs, and the sum over replicas is the full gradient.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.makers import maker_of
from cyxjax.core.mesh import AXIS
from cyxjax.core.replica import psum
from cyxjax.core.rows import Weighed, num_rows
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError, DataError

_is_part: ContextVar[bool] = ContextVar("rows_are_a_part_of_the_batch", default=False)


def part_of_batch(is_part: bool) -> AbstractContextManager[None]:
    """Declares that what is called inside gets the rows of one process among several, if `is_part`."""
    return holding(_is_part, is_part)


class Rows(NamedTuple):
    """Samples with the model's output for them."""

    output: PyTree  # leaves (n, ...)
    target: PyTree
    weight: jax.Array  # float32 (n,): 1 for a sample, 0 for padding
    place: jax.Array  # int32 (n,): index in the global batch


@dataclass(frozen=True, eq=False)
class GlobalLoss:
    """A user's loss over the global batch.

    fn: (output, target, weight) -> its mean over the rows of weight 1, a scalar; or one value per row. It may
    omit `weight` if the last batch is never short. A third parameter with a default is a setting, unless it
    is called `weight`.
    by_row: fn is (own: Rows, whole: Rows) -> values (B,) for `own`, the rows of one replica, compared with
    the `whole` batch: (B, N) numbers in memory instead of (N, N). Gradients reach all of `whole`.
    look: (output, target) -> the parts of them that fn sees, of all rows.
    """

    fn: Callable
    by_row: bool = False
    look: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda output, target: (output, target)

    def to_per_example(self) -> "GlobalLoss":
        """The loss itself: a step calls `of_rows`."""
        return self

    @property
    def takes_padding(self) -> bool:
        """Whether `fn` takes the weights of the rows, 0 for padding."""
        third = [*inspect.signature(self.fn).parameters.values()][2:3]
        return self.by_row or any(one.default is one.empty or one.name == "weight" for one in third)

    def __call__(self, output: PyTree, target: PyTree) -> Any:
        """float32 (B,): the loss of these rows as a batch of their own, repeated for each row; for the output
        of a wrapped model, a loss with `.backward()`. Raises: ConfigError in a `part_of_batch`.
        """
        if maker := maker_of(output):
            return maker.loss(self, output, target)
        if _is_part.get():
            raise ConfigError(
                f"{type(self).__name__} compares samples of all processes, but a ddp has only its own rows. "
                "HINT: train with cx.distributed.DistributedTrainer(model, loss, optimizer)."
            )
        weight = jnp.ones(num_rows((output, target)), jnp.float32)
        return jnp.broadcast_to(self.of_batch(output, target, weight), weight.shape)

    def of_batch(self, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        """float32 (): the loss of these rows as a batch of their own."""
        if self.by_row:
            rows = Rows(*self.look(output, target), weight, jnp.arange(len(weight), dtype=jnp.int32))
            return _mean(self.fn(rows, rows), weight)
        more = (weight,) if self.takes_padding else ()
        return _mean(self.fn(*self.look(output, target), *more), weight)

    def of_rows(self, output: PyTree, target: PyTree, weight: jax.Array) -> Weighed:
        """The loss for one replica's rows, inside `model_map`; gradients add up over replicas."""
        replicas, replica = lax.axis_size(AXIS), lax.axis_index(AXIS)
        whole = jax.tree.map(_gathered, (output, target, weight))
        if self.by_row:
            count = jnp.arange(len(weight), dtype=jnp.int32)
            own = Rows(*self.look(output, target), weight, count * replicas + replica)
            places = jnp.arange(len(weight) * replicas, dtype=jnp.int32)
            others = Rows(*self.look(*whole[:2]), whole[2], places)
            return Weighed(_of_rows(self.fn(own, others), weight), None)
        part = weight.sum() / jnp.maximum(psum(weight.sum()), 1.0)
        mine = jax.tree.map(lambda a, own: _with_own(a, own, replica, part), whole[0], output)
        value = self.of_batch(mine, *whole[1:])
        # A step sums weight * value over all rows and divides by their number. Here each row holds the whole
        # loss, but a replica's gradient is for its own outputs only: scale it to count for all rows.
        share = psum(weight.sum()) / jnp.maximum(weight.sum(), 1.0)
        value = lax.stop_gradient(value) + share * (value - lax.stop_gradient(value))
        return Weighed(jnp.broadcast_to(value, weight.shape), None)


def _of_rows(values: jax.Array, weight: jax.Array) -> jax.Array:
    """`values` as float32. Raises: DataError unless there is one for each row."""
    if values.shape != weight.shape:
        raise DataError(
            f"the global loss has shape {values.shape}, expected {weight.shape}. HINT: return one per row."
        )
    return values.astype(jnp.float32)


def _mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    if values.ndim == 0:
        return values.astype(jnp.float32)
    return jnp.where(weight > 0, _of_rows(values, weight), 0.0) @ weight / jnp.maximum(weight.sum(), 1.0)


def _gathered(a: jax.Array) -> jax.Array:
    """(B, ...) of each replica as (N, ...), ordered by row, then replica; a scalar is returned unchanged."""
    if not a.ndim:
        return a
    stacked = lax.all_gather(a, AXIS, axis=1)
    return stacked.reshape(-1, *a.shape[1:])


def _with_own(whole: jax.Array, own: jax.Array, replica: jax.Array, part: jax.Array) -> jax.Array:
    """`whole` (N, ...) as a constant, except for the rows `own` (B, ...) of this replica.

    A scalar belongs to no sample: each replica gets `part` of its gradient, its fraction of all rows.
    """
    if not own.ndim:
        return lax.stop_gradient(own) + part.astype(own.dtype) * (own - lax.stop_gradient(own))
    others = lax.stop_gradient(whole).reshape(len(own), -1, *own.shape[1:])
    return lax.dynamic_update_index_in_dim(others, own, replica, 1).reshape(whole.shape)


def sees_whole_batch(loss: Any) -> bool:
    """Whether `loss` is a loss over the global batch."""
    return hasattr(loss, "of_rows")


def of_one_device(loss: Any) -> Callable:
    """`loss` as a function of the given rows, for programs on one device."""
    return (lambda output, target: loss(output, target)) if sees_whole_batch(loss) else loss


class ContrastiveLoss(GlobalLoss):
    """InfoNCE over the global batch: pulls a sample's two embeddings together, away from those of all others.

    The model's output is a pair of arrays (B, D), as a tuple or a dict of two; they are normalised here. The
    loss is the mean of both directions, as in CLIP. Memory: (B, N) similarities on each replica.
    Source: van den Oord et al. 2018, arXiv:1807.03748; Radford et al. 2021, arXiv:2103.00020.
    """

    def __init__(self, temperature: float = 0.1):
        super().__init__(lambda own, whole: _info_nce(own, whole, temperature), by_row=True)


def _info_nce(own: Rows, whole: Rows, temperature: float) -> jax.Array:
    (a, b), (all_a, all_b) = _pair(own.output), _pair(whole.output)
    # Padding is excluded from all negatives; a padding row keeps its own column and has zero weight.
    allowed = (whole.weight > 0)[None] | (whole.place[None] == own.place[:, None])

    def one_way(x: jax.Array, others: jax.Array) -> jax.Array:
        similar = jnp.where(allowed, x @ others.T / temperature, -jnp.inf)
        return -jnp.take_along_axis(jax.nn.log_softmax(similar), own.place[:, None], axis=1)[:, 0]

    return (one_way(a, all_b) + one_way(b, all_a)) / 2


def _pair(output: PyTree) -> tuple[jax.Array, jax.Array]:
    """Both embeddings, scaled to length 1."""
    x, y = (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(output))
    unit = lambda v: v * lax.rsqrt(jnp.square(v).sum(-1, keepdims=True) + 1e-12)  # noqa: E731
    return unit(x), unit(y)
