"""What a step measures: named (sum, count) pairs, so that means are exact over any split of the data.

A step returns them as one small float32 array, shape (number of metrics, 2): one transfer to read.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.errors import ConfigError

PyTree = Any
Metric = Callable[[PyTree, PyTree], jax.Array | None]
"""(output, target) -> one value an example, float32 (B,); None where it has no meaning."""


def accuracy(output: PyTree, target: PyTree) -> jax.Array | None:
    """1 where the largest logit (or the sign of a single one) is the label, averaged over positions.

    None unless target holds integer labels, or 0/1 of the output's shape is not what it holds.
    """
    if not isinstance(output, jax.Array) or not isinstance(target, jax.Array):
        return None
    if not jnp.issubdtype(target.dtype, jnp.integer) or output.shape[:-1] != target.shape:
        return None
    hit = (jnp.argmax(output, -1).astype(target.dtype) == target).astype(jnp.float32)
    return hit.reshape(hit.shape[0], -1).mean(1)


class Metrics:
    """The metrics of a task, in a fixed order: `loss` first, then `accuracy`, then the user's own.

    better: "min" or "max" by name, for those of the user's that a run may watch: `{"top2": "max"}`.
    Raises: ConfigError for a metric named loss, or a direction that is none.
    """

    def __init__(self, extra: Mapping[str, Metric] | None = None, *, better: Mapping[str, str] | None = None):
        own, said = dict(extra or {}), dict(better or {})
        if "loss" in own or not {*said} <= {*own} or not {*said.values()} <= {"min", "max"}:
            raise ConfigError(
                f"metrics {sorted(own)} with better={said}: 'loss' is the loss function's own, and better "
                "says 'min' or 'max' of those given. HINT: Metrics({'top2': f}, better={'top2': 'max'})."
            )
        self._extra = {"accuracy": accuracy, **own}
        self.names = ("loss", *self._extra)
        self.better: dict[str, str] = {"loss": "min", "accuracy": "max", **said}

    def sums(self, losses: jax.Array, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        """float32 (len(names), 2): weighted sum and weight of each; (0, 0) for one without meaning."""
        values = [losses, *(metric(output, target) for metric in self._extra.values())]

        # `where`, not a product: what a padding row holds may be NaN, and 0 * NaN is NaN.
        def pair(v: jax.Array | None) -> jax.Array:
            return (
                jnp.zeros(2) if v is None else jnp.stack([jnp.where(weight > 0, v, 0) @ weight, weight.sum()])
            )

        return jnp.stack([pair(v) for v in values])

    def means(self, sums: np.ndarray) -> dict[str, float]:
        """name -> sum / count; NaN where nothing was counted."""
        return {n: float(s / c) if c else float("nan") for n, (s, c) in zip(self.names, sums, strict=True)}
