"""What a loss or a metric gives for a batch: a value a sample, and what each of them weighs in a mean.

A mean over the global batch is sum(weight * value) / sum(weight) over all replicas' samples, whatever replica
and micro-batch they lie in. Padding weighs nothing; so does a token that is masked out.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.model.model_fns import Sown

PyTree = Any


class Weighed(NamedTuple):
    """A value for each row of a batch."""

    values: jax.Array  # float32 (B,)
    weights: jax.Array | None  # float32 (B,), padding 0; None: each row weighs what its sample does

    def pair(self, weight: jax.Array) -> jax.Array:
        """float32 (2,): (weighted sum, sum of weights). weight: of the rows, 0 for padding."""
        w = weight if self.weights is None else self.weights
        # `where`, not a product: what a padding row holds may be NaN, and 0 * NaN is NaN.
        return jnp.stack([jnp.where(w > 0, self.values, 0) @ w, w.sum()])


Losses: TypeAlias = "list[Weighed] | Weighed | jax.Array | None"
"""What a loss says of the rows: one mean, or several that are added up."""


def loss_rows(losses: Losses, weight: jax.Array, count: int) -> jax.Array:
    """float32 (count, 2): the mean over samples, or the only one, and the others below; zeros after them."""
    if losses is None:
        return jnp.zeros((count, 2))
    found = losses if isinstance(losses, list) else [losses]
    each = [one if isinstance(one, Weighed) else Weighed(one, None) for one in found]
    apart = [one.pair(weight) for one in each if one.weights is not None] if count > 1 else []
    first = [one for one in each if one.weights is None] if count > 1 else each
    none = Weighed(jnp.zeros(weight.shape, jnp.float32), None)
    total = first[0] if first else none
    for one in first[1:]:
        total = Weighed(total.values + one.values, None)
    rows = jnp.stack([total.pair(weight), *apart])
    return jnp.pad(rows, ((0, count - len(rows)), (0, 0)))


def weighed(measure: Any, output: PyTree, target: PyTree, weight: jax.Array) -> Weighed | None:
    """What `measure`, a loss or a metric, says of the rows; None where it has no meaning.

    measure: gives values (B,), or (values, weights) of shape (B, ...) each; or has `of_rows(output, target,
    weight) -> Weighed`, for one that looks at more than a sample at a time.
    """
    output = output.output if isinstance(output, Sown) else output
    of_rows = getattr(measure, "of_rows", None)
    given = measure(output, target) if of_rows is None else of_rows(output, target, weight)
    if given is None or isinstance(given, Weighed):
        return given
    if not isinstance(given, tuple):
        return Weighed(given, None)
    values, weights = by_sample(*given)
    return Weighed(values, jnp.where(weight > 0, weight * weights, 0.0))


def by_sample(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(B, ...) values and their weights as one of each a sample, float32 (B,): its weighted mean, its weight.

    No gradient goes through weights. Where they are 0, values may be anything.
    """
    v = values.astype(jnp.float32).reshape(values.shape[0], -1)
    w = lax.stop_gradient(weights).astype(jnp.float32).reshape(v.shape)
    total = w.sum(1)
    return jnp.where(w > 0, v * w, 0.0).sum(1) / jnp.where(total > 0, total, 1.0), total
