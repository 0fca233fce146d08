"""Losses that a model sows: which may be added to the samples' losses.

A value a sample is added to the sample's. One number for a batch is added as it is where it is of parameters
alone (a penalty of weights); one of the batch, such as a balance of experts over it, is another number for
each share of the batch, and is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from cyxjax.core.trees import PyTree
from cyxjax.errors import DataError


def holds_losses(collection: str) -> bool:
    """Whether its last word is `loss` or `losses`: `aux_loss` does, `loss_stats` and `glossary` do not."""
    return collection.split("_")[-1] in ("loss", "losses")


def sum_of_sown(
    losses: Sequence[tuple[str, jax.Array]], again: Callable, inputs: PyTree, key: Any
) -> jax.Array:
    """float32 (B,): all losses a model sowed, by the name of where.

    again: (inputs, key) -> the same losses. Raises: DataError for one that is neither a value a sample nor of
    parameters alone.
    """
    rows = jax.tree.leaves(inputs)[0].shape[0]
    for name, leaf in losses:
        if leaf.ndim and leaf.shape[0] != rows:
            raise _refused(name, leaf.shape, rows, "")
    scalars = [leaf.ndim == 0 for _, leaf in losses]
    if any(scalars):
        drawn = of_inputs(lambda given, _: again(*given), (inputs, key))
        refused = next(
            (
                n
                for n, (is_one, of_batch) in enumerate(zip(scalars, drawn, strict=True))
                if is_one and of_batch
            ),
            None,
        )
        if refused is not None:
            raise _refused(losses[refused][0], (), rows, ", which depends on the batch")
    return sum((_row(leaf, rows) for _, leaf in losses), jnp.zeros(rows))


def _row(leaf: jax.Array, rows: int) -> jax.Array:
    leaf = leaf.astype(jnp.float32)
    return leaf.reshape(rows, -1).mean(1) if leaf.ndim else jnp.broadcast_to(leaf, (rows,))


def of_inputs(run: Callable, given: PyTree, other: PyTree = ()) -> list[bool]:
    """By leaf of `run(given, other)`, whether it is made from `given`. Nothing is computed."""
    closed = jax.make_jaxpr(run)(given, other)
    reached = set(closed.jaxpr.invars[: len(jax.tree.leaves(given))])
    for eqn in closed.jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in reached for v in closed.jaxpr.outvars]


def _refused(name: str, shape: tuple, rows: int, why: str) -> DataError:
    return DataError(
        f"the model sows a loss of shape {shape} into {name!r}{why}; expected ({rows},): one value a "
        "sample, so that padding weighs nothing. HINT: sow the value of each sample, not their mean."
    )
