"""What a step measures: sums over samples, so that what is made of them is exact over any split of the data.

A step returns them as one small float32 array, shape (num_rows, 2): one transfer to read. A mean is one row,
(sum, count); a statistic (F1, a confusion matrix) is as many as it has numbers.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.objective.foreign_metrics import as_statistic, unpacked
from cyxjax.core.rows import Weighed, weighed
from cyxjax.core.statistics import Packed
from cyxjax.errors import ConfigError

PyTree = Any
Metric = Callable[[PyTree, PyTree], jax.Array | tuple[jax.Array, jax.Array] | None]
"""(output, target) -> one value an example, float32 (B,); (values, weights), (B, ...) each; None where it has
no meaning."""


GRAD_NORM = "grad_norm"


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


class _Mean(NamedTuple):
    """A metric of a value a sample: one row, its weighted sum and weight; (0, 0) where it has no meaning."""

    name: str
    metric: Metric

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def num_rows(self) -> int:
        return 1

    def rows(self, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        found = weighed(self.metric, output, target, weight)
        return (jnp.zeros(2) if found is None else found.pair(weight))[None]

    def values(self, rows: np.ndarray) -> dict[str, Any]:
        return {self.name: _mean(rows[0])}


def _mean(pair: np.ndarray) -> float:
    return float(pair[0] / pair[1]) if pair[1] else float("nan")


class Metrics:
    """The metrics of a task, in a fixed order: `loss` first, then `accuracy`, then the user's own.

    extra: functions (see Metric), statistics (`cx.F1(10)`, a `cx.Statistic`) and metric classes of clu and
    metrax by name; or a clu Collection.
    better: "min" or "max" by name, for those of the user's that a run may watch: `{"top2": "max"}`.
    ignore_index: a label that counts nothing in accuracy, as in the loss. labels: (output, target) -> what of
    them are logits and labels.
    Raises: ConfigError for a metric named loss or grad_norm, or a direction that is none.
    """

    def __init__(
        self,
        extra: Mapping[str, Any] | None = None,
        *,
        better: Mapping[str, str] | None = None,
        ignore_index: int | None = None,
        labels: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
    ):
        own, said = unpacked(extra), dict(better or {})
        if {"loss", GRAD_NORM} & {*own} or not {*said.values()} <= {"min", "max"}:
            raise _no_such(own, said)
        self._own, self.ignore_index, self.labels = own, ignore_index, labels or _whole
        hit = partial(accuracy, ignore_index=ignore_index)
        self._extra = {"accuracy": hit if labels is None else lambda o, t: hit(*labels(o, t)), **own}
        statistics = {name: as_statistic(name, metric) for name, metric in own.items()}
        self._measures: list[_Mean | Packed] = [
            Packed(name, found) if (found := statistics.get(name)) else _Mean(name, metric)
            for name, metric in self._extra.items()
        ]
        self._said = said
        if not {*said} <= {*own} and not {*said} <= {*self.names}:
            raise _no_such(own, said)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that are measured."""
        return ("loss", *(name for measure in self._measures for name in measure.names))

    @cached_property
    def better(self) -> dict[str, str]:
        """name -> "min" or "max", of those where it is known."""
        known = {"loss": "min", "accuracy": "max"}
        for measure in self._measures:
            way = self._said.get(measure.name) or getattr(getattr(measure, "statistic", None), "better", None)
            known |= dict.fromkeys(measure.names, way) if way else {}
        return known | self._said

    @cached_property
    def num_rows(self) -> int:
        """Of `sums`: one for a mean, half the numbers of a statistic."""
        return 1 + sum(measure.num_rows for measure in self._measures)

    @property
    def num_training_rows(self) -> int:
        """Of what a training step gives: those of `sums`, and the norm of the mean gradients."""
        return self.num_rows + 1

    def ignoring(self, ignore_index: int | None) -> "Metrics":
        """These, whose accuracy leaves out what the loss leaves out."""
        if ignore_index is None:
            return self
        return Metrics(self._own, better=self._said, ignore_index=ignore_index, labels=self.labels)

    @property
    def own(self) -> dict[str, Any]:
        """The user's, by name."""
        return dict(self._own)

    def joined(self, other: "Metrics") -> "Metrics":
        """These, and what `other` measures besides loss and accuracy."""
        own, better = {**self._own, **other._own}, {**self._said, **other._said}
        return Metrics(own, better=better, ignore_index=self.ignore_index, labels=self.labels)

    def sums(
        self, losses: Weighed | jax.Array | None, output: PyTree, target: PyTree, weight: jax.Array
    ) -> jax.Array:
        """float32 (num_rows, 2): of each mean the weighted sum and weight, of each statistic its numbers."""
        loss = Weighed(losses, None) if isinstance(losses, jax.Array) else losses
        first = jnp.zeros(2) if loss is None else loss.pair(weight)
        return jnp.concatenate([first[None], *(m.rows(output, target, weight) for m in self._measures)])

    def means(self, sums: np.ndarray) -> dict[str, Any]:
        """name -> number, or array of a statistic that gives one; NaN where nothing was counted.

        sums: num_rows, or num_training_rows of them; a norm that was not measured is left out.
        """
        made, place = {"loss": _mean(sums[0])}, 1
        for measure in self._measures:
            made |= measure.values(sums[place : place + measure.num_rows])
            place += measure.num_rows
        if sums[place:, 1].any():
            made[GRAD_NORM] = _mean(sums[place])
        return made


def numbers(means: Mapping[str, Any]) -> dict[str, float]:
    """Those of `Metrics.means` that are numbers."""
    return {name: value for name, value in means.items() if not isinstance(value, np.ndarray)}


def _no_such(own: Mapping[str, Any], said: Mapping[str, str]) -> ConfigError:
    return ConfigError(
        f"metrics {sorted(own)} with better={said}: 'loss' and 'grad_norm' are measured already, and "
        "better says 'min' or 'max' of those given. HINT: Metrics({'top2': f}, better={'top2': 'max'})."
    )


def metrics_of(loss: Any, given: Metrics | None) -> Metrics:
    """What a run measures: what a task says, if `loss` is one, and what was `given`."""
    if hasattr(loss, "to_metrics"):
        return loss.to_metrics() if given is None else loss.to_metrics().joined(given)
    return (given or Metrics()).ignoring(getattr(loss, "ignore_index", None))
