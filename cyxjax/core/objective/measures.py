"""Metrics ready for `cx.Metrics` or a `cx.Task`: a value and a weight a position, exact over ranks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cyxjax.core.metrics import Metric
from cyxjax.errors import ConfigError


def top_k(k: int, *, ignore_index: int | None = None) -> Metric:
    """1 where the label is among the `k` largest logits (B, ..., C); a tie with the label's counts for it.

    ignore_index: a label that counts nothing. Raises: ConfigError unless 1 <= k <= C.
    """
    if k < 1:
        raise ConfigError(f"top_k({k}): expected 1 or more. HINT: top_k(5).")

    def hits(output: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        if k > output.shape[-1]:
            raise ConfigError(
                f"top_k({k}) of {output.shape[-1]} classes is always right. HINT: k below their number.",
                key="metrics",
            )
        counts = _counts(target, ignore_index)
        label = jnp.where(counts, target, 0).astype(jnp.int32)
        own = jnp.take_along_axis(output, label[..., None], axis=-1)
        return ((output > own).sum(-1) < k).astype(jnp.float32), counts.astype(jnp.float32)

    return hits


def per_class(names: Sequence[str], *, ignore_index: int | None = None) -> dict[str, Metric]:
    """{"recall_<name>": ..., "precision_<name>": ...} of each class, `names` in the order of the logits.

    recall: of the samples of a class, how many were found; precision: of those taken for it, how many are.
    NaN where there are none.
    """

    def recall(number: int) -> Metric:
        return lambda output, target: _where(_guess(output) == number, target == number)

    def precision(number: int) -> Metric:
        def right(output: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _where(target == number, (_guess(output) == number) & _counts(target, ignore_index))

        return right

    made = {f"recall_{name}": recall(number) for number, name in enumerate(names)}
    return made | {f"precision_{name}": precision(number) for number, name in enumerate(names)}


def _where(right: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    return right.astype(jnp.float32), counts.astype(jnp.float32)


def _guess(output: jax.Array) -> jax.Array:
    return jnp.argmax(output, -1)


def _counts(target: jax.Array, ignore_index: int | None) -> jax.Array:
    return jnp.ones(target.shape, bool) if ignore_index is None else target != ignore_index
