"""What a step measures: named (sum, count) pairs, so that means are exact over any split of the data.

A step returns them as one small float32 array, shape (number of metrics, 2): one transfer to read.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.rows import Weighed, weighed
from cyxjax.errors import ConfigError

PyTree = Any
Metric = Callable[[PyTree, PyTree], jax.Array | tuple[jax.Array, jax.Array] | None]
"""(output, target) -> one value an example, float32 (B,); (values, weights), (B, ...) each; None where it has
no meaning."""


def accuracy(
    output: PyTree, target: PyTree, ignore_index: int | None = None
) -> jax.Array | tuple[jax.Array, jax.Array] | None:
    """1 where the largest logit (or the sign of a single one) is the label, averaged over positions.

    ignore_index: a label that counts nothing; then (values, weights) are given.
    None unless target holds integer labels, or 0/1 of the output's shape is not what it holds.
    """
    if not isinstance(output, jax.Array) or not isinstance(target, jax.Array):
        return None
    if not jnp.issubdtype(target.dtype, jnp.integer) or output.shape[:-1] != target.shape:
        return None
    hit = (jnp.argmax(output, -1).astype(target.dtype) == target).astype(jnp.float32)
    if ignore_index is not None:
        return hit, (target != ignore_index).astype(jnp.float32)
    return hit.reshape(hit.shape[0], -1).mean(1)


def _whole(output: PyTree, target: PyTree) -> tuple[PyTree, PyTree]:
    return output, target


class Metrics:
    """The metrics of a task, in a fixed order: `loss` first, then `accuracy`, then the user's own.

    better: "min" or "max" by name, for those of the user's that a run may watch: `{"top2": "max"}`.
    ignore_index: a label that counts nothing in accuracy, as in the loss. labels: (output, target) -> what of
    them are logits and labels.
    Raises: ConfigError for a metric named loss, or a direction that is none.
    """

    def __init__(
        self,
        extra: Mapping[str, Metric] | None = None,
        *,
        better: Mapping[str, str] | None = None,
        ignore_index: int | None = None,
        labels: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
    ):
        own, said = dict(extra or {}), dict(better or {})
        if "loss" in own or not {*said} <= {*own} or not {*said.values()} <= {"min", "max"}:
            raise ConfigError(
                f"metrics {sorted(own)} with better={said}: 'loss' is the loss function's own, and better "
                "says 'min' or 'max' of those given. HINT: Metrics({'top2': f}, better={'top2': 'max'})."
            )
        self._own, self.ignore_index, self.labels = own, ignore_index, labels or _whole
        hit = partial(accuracy, ignore_index=ignore_index)
        self._extra = {"accuracy": hit if labels is None else lambda o, t: hit(*labels(o, t)), **own}
        self.names = ("loss", *self._extra)
        self.better: dict[str, str] = {"loss": "min", "accuracy": "max", **said}

    def ignoring(self, ignore_index: int | None) -> "Metrics":
        """These, whose accuracy leaves out what the loss leaves out."""
        if ignore_index is None:
            return self
        own = {name: self.better[name] for name in self._own if name in self.better}
        return Metrics(self._own, better=own, ignore_index=ignore_index, labels=self.labels)

    @property
    def own(self) -> dict[str, Metric]:
        """The user's, by name."""
        return dict(self._own)

    def joined(self, other: "Metrics") -> "Metrics":
        """These, and what `other` measures besides loss and accuracy."""
        better = {name: way for m in (self, other) for name, way in m.better.items() if name in m._own}
        own = {**self._own, **other._own}
        return Metrics(own, better=better, ignore_index=self.ignore_index, labels=self.labels)

    def sums(
        self, losses: Weighed | jax.Array | None, output: PyTree, target: PyTree, weight: jax.Array
    ) -> jax.Array:
        """float32 (len(names), 2): weighted sum and weight of each; (0, 0) for one without meaning."""
        loss = Weighed(losses, None) if isinstance(losses, jax.Array) else losses
        own = (weighed(metric, output, target, weight) for metric in self._extra.values())
        return jnp.stack([jnp.zeros(2) if v is None else v.pair(weight) for v in (loss, *own)])

    def means(self, sums: np.ndarray) -> dict[str, float]:
        """name -> sum / count; NaN where nothing was counted."""
        return {n: float(s / c) if c else float("nan") for n, (s, c) in zip(self.names, sums, strict=True)}


def metrics_of(loss: Any, given: Metrics | None) -> Metrics:
    """What a run measures: what a task says, if `loss` is one, and what was `given`."""
    if hasattr(loss, "to_metrics"):
        return loss.to_metrics() if given is None else loss.to_metrics().joined(given)
    return (given or Metrics()).ignoring(getattr(loss, "ignore_index", None))
