"""Metrics of a step, as sums over samples: their means and statistics are exact for any split of the data.

A step returns them as one small float32 array, shape (num_rows, 2): one transfer to read. A mean is one row,
(sum, count); a statistic (F1, a confusion matrix) is as many as it has numbers.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.rows import Losses, loss_rows, weighed
from cyxjax.core.statistics import Packed, Statistic, of_sums
from cyxjax.core.trees import PyTree, as_labels
from cyxjax.errors import ConfigError, DataError

Metric = Callable[[PyTree, PyTree], jax.Array | tuple[jax.Array, jax.Array] | None]
"""(output, target) -> one value an example, float32 (B,); (values, weights), (B, ...) each; one number, used
as a loss of one number is; None where it has no meaning."""


GRAD_NORM = "grad_norm"


def counts(target: jax.Array, ignore_index: int | None) -> jax.Array:
    """Where labels count in a metric: those below 0 are padding of the user's loss, and name no class."""
    labels = target >= 0
    return labels if ignore_index is None else labels & (target != ignore_index)


def accuracy(
    output: PyTree, target: PyTree, ignore_index: int | None = None
) -> tuple[jax.Array, jax.Array] | None:
    """(part of a sample's labels that are the largest logit, part of its positions that have a label).

    ignore_index: a label that counts nothing. None unless target holds integer or boolean labels of two or
    more outputs: one output is a number, a rate of counts or a logit, and not a class.
    """
    if not isinstance(output, jax.Array) or not isinstance(target, jax.Array):
        return None
    target = as_labels(target)
    is_logits = output.shape[:-1] == target.shape and output.shape[-1] > 1
    if not jnp.issubdtype(target.dtype, jnp.integer) or not is_logits:
        return None
    right = jnp.argmax(output, -1).astype(target.dtype) == target
    hit, kept = (a.reshape(len(a), -1) for a in (right, counts(target, ignore_index)))
    labels = kept.sum(1)
    return (hit & kept).sum(1) / jnp.maximum(labels, 1), labels / kept.shape[1]


def _whole(output: PyTree, target: PyTree) -> tuple[PyTree, PyTree]:
    return output, target


def _mean_of(name: str, metric: Metric) -> Statistic:
    """Of a value a sample: their weighted sum and weight, and the mean; (0, 0) where it has no meaning."""

    def counted(output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        found = weighed(metric, output, target, weight, f"metric {name!r}")
        return jnp.zeros(2) if found is None else found.pair(weight)

    return of_sums((2,), counted, _mean)


def _mean(pair: np.ndarray) -> float:
    return float(pair[0] / pair[1]) if pair[1] else float("nan")


class Metrics:
    """The metrics of a task, in a fixed order: `loss` first, then `accuracy`, then the user's own.

    extra: functions (see Metric) and statistics (`cx.F1(10)`, a `cx.Statistic`) by name.
    better: "min" or "max" by name, for those of the user's that a run may watch: `{"top2": "max"}`.
    ignore_index: a label that counts nothing in accuracy, as in the loss. labels: (output, target) -> what of
    them are logits and labels. means: of how many means besides the samples' the loss may be made.
    Raises: ConfigError for a metric named loss or grad_norm, or a direction that is none.
    """

    def __init__(
        self,
        extra: Mapping[str, Any] | None = None,
        *,
        better: Mapping[str, str] | None = None,
        ignore_index: int | None = None,
        labels: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
        means: int = 0,
    ):
        self.own, self._better = dict(extra or {}), dict(better or {})
        self.ignore_index, self.labels = ignore_index, labels or _whole
        self._first = 1 + means  # rows of the loss
        hit = lambda output, target: accuracy(*self.labels(output, target), ignore_index)  # noqa: E731
        self._measures = [
            Packed(name, metric if isinstance(metric, Statistic) else _mean_of(name, metric))
            for name, metric in {"accuracy": hit, **self.own}.items()
        ]
        taken, ways, known = {"loss", GRAD_NORM} & {*self.own}, {*self._better.values()}, {*self.own}
        # `names` computes statistics of nothing: only where a name is none of the user's.
        unknown = not taken and not {*self._better} <= known and not {*self._better} <= {*self.names}
        if taken or not ways <= {"min", "max"} or unknown:
            raise ConfigError(
                f"metrics {sorted(self.own)} with better={self._better}: 'loss' and 'grad_norm' are measured "
                "already, and better says 'min' or 'max' of those given. HINT: "
                "Metrics({'top2': f}, better={'top2': 'max'})."
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that are measured."""
        return ("loss", *(name for measure in self._measures for name in measure.names))

    @cached_property
    def better(self) -> dict[str, str]:
        """name -> "min" or "max", of those where it is known."""
        known = {"loss": "min", "accuracy": "max"}
        for measure in self._measures:
            if way := self._better.get(measure.name) or measure.statistic.better:
                known |= dict.fromkeys(measure.names, way)
        return known | self._better

    @cached_property
    def num_rows(self) -> int:
        """Of `sums`: one for a mean, half the numbers of a statistic."""
        return self._first + sum(measure.num_rows for measure in self._measures)

    @property
    def num_training_rows(self) -> int:
        """Of what a training step gives: those of `sums`, and the norm of the mean gradients."""
        return self.num_rows + 1

    def joined(self, other: "Metrics", ignore_index: int | None = None) -> "Metrics":
        """These, and what `other` measures besides loss and accuracy, which leaves out `ignore_index`."""
        return Metrics(
            {**self.own, **other.own},
            better={**self._better, **other._better},
            ignore_index=self.ignore_index if ignore_index is None else ignore_index,
            labels=self.labels,
            means=self._first - 1,
        )

    def sums(self, losses: Losses, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        """float32 (num_rows, 2): of each mean the weighted sum and weight, of each statistic its numbers."""
        first = loss_rows(losses, weight, self._first)
        return jnp.concatenate([first, *(m.rows(output, target, weight) for m in self._measures)])

    def check_merges(self) -> None:
        """Returns where the states of statistics add up. Raises: ConfigError naming one whose do not."""
        for measure in self._measures:
            if measure.statistic.merge is not jnp.add:
                measure.check_merge()

    def settled(self, sums: jax.Array) -> jax.Array:
        """`sums` of one step over all replicas; the first row is its loss, also where that has several means.

        So the loss of an epoch is the mean of its steps', each by its samples.
        """
        if self._first == 1:
            return sums
        apart = sums[1 : self._first]
        loss = jnp.where(apart[:, 1] != 0, apart[:, 0] / jnp.where(apart[:, 1] != 0, apart[:, 1], 1.0), 0.0)
        sums = sums.at[0, 0].add(sums[0, 1] * loss.sum())
        return sums.at[1 : self._first].set(0.0)

    def means(self, sums: np.ndarray) -> dict[str, Any]:
        """name -> number, or array of a statistic that gives one; NaN where nothing was counted.

        sums: num_rows, or num_training_rows of them; a norm that was not measured is left out.
        """
        apart = sum(_mean(row) for row in sums[1 : self._first] if row[1])
        made, place = {"loss": _mean(sums[0]) + apart}, self._first
        for measure in self._measures:
            made |= measure.values(sums[place : place + measure.num_rows])
            place += measure.num_rows
        if sums[place:, 1].any():
            made[GRAD_NORM] = _mean(sums[place])
        return made

    def over_all(self, sums: np.ndarray, what: str) -> dict[str, Any]:
        """`means` of all of `what`. Raises: DataError where the loss is a mean of nothing."""
        if not sums[: self._first, 1].any():
            raise DataError(
                f"no sample of {what} weighs anything in the loss: weights are 0, or labels ignored, in all. "
                "HINT: look at ignore_index, class weights and masks."
            )
        return self.means(sums)


def numbers(means: Mapping[str, Any]) -> dict[str, float]:
    """Those of `Metrics.means` that are numbers."""
    return {name: value for name, value in means.items() if not isinstance(value, np.ndarray)}


def metrics_of(loss: Any, given: Metrics | Mapping[str, Any] | None) -> Metrics:
    """What a run measures: what a task says, if `loss` is one, and what was `given`: functions by name.

    Raises: ConfigError for metrics that are neither a `Metrics` nor a dict.
    """
    given = Metrics(given) if isinstance(given, Mapping) else given
    if given and not isinstance(given, Metrics):
        raise ConfigError(
            f"metrics: expected a cx.Metrics, got {type(given).__name__}. HINT: metrics=cx.Metrics({{'name': "
            "function}); loss and accuracy are measured already."
        )
    given = given or Metrics()
    if hasattr(loss, "to_metrics"):
        return loss.to_metrics().joined(given)
    return given.joined(Metrics(), getattr(loss, "ignore_index", None))
