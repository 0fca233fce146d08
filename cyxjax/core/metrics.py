"""Metrics of a step, as sums over samples: their means and statistics are exact for any split of the data.

A step returns them as one small float32 array of shape (num_rows, 2), which takes one transfer to read. A
mean is one row, (sum, count); a statistic (F1, a confusion matrix) takes one row for every two numbers.
"""

from collections.abc import Callable, Mapping, Sequence
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
"""(output, target) -> one value per example, float32 (B,); or (values, weights), each (B, ...); or one
number, treated as a loss of one number is; or None where the metric has no meaning."""


GRAD_NORM = "grad_norm"


def counts(target: jax.Array, ignore_index: int | None) -> jax.Array:
    """Mask of the labels that count in a metric. Labels below 0 are padding, not classes."""
    target = as_labels(target)
    return (target >= 0) if ignore_index is None else (target >= 0) & (target != ignore_index)


def accuracy(
    output: PyTree, target: PyTree, ignore_index: int | None = None
) -> tuple[jax.Array, jax.Array] | None:
    """(values, weights) by sample: the part of its labels predicted right, and their number.

    ignore_index: a label that is left out. Returns None unless target holds integer or boolean labels and
    there are two or more outputs: a single output is a number, a rate or a logit, not a class.
    """
    if not isinstance(output, jax.Array) or not isinstance(target, jax.Array):
        return None
    target = as_labels(target)
    is_logits = output.shape[:-1] == target.shape and output.shape[-1] > 1
    if not jnp.issubdtype(target.dtype, jnp.integer) or not is_logits:
        return None
    right = jnp.argmax(output, -1).astype(jnp.int32) == target
    hit, kept = (a.reshape(len(a), -1) for a in (right, counts(target, ignore_index)))
    labels = kept.sum(1)
    return (hit & kept).sum(1) / jnp.maximum(labels, 1), labels.astype(jnp.float32)


def _mean_of(name: str, metric: Metric) -> Statistic:
    """The mean of `metric` as a statistic: (weighted sum, weight), or (0, 0) where it has no meaning."""

    def counted(output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        found = weighed(metric, output, target, weight, f"metric {name!r}")
        return jnp.zeros(2) if found is None else found.pair(weight)

    return of_sums((2,), counted, _mean)


def _mean(pair: np.ndarray) -> float:
    return float(pair[0] / pair[1]) if pair[1] else float("nan")


class Metrics:
    """The metrics of a task, in a fixed order: `loss` first, then `accuracy`, then the user's own.

    extra: functions (see Metric) and statistics (`cx.F1(10)`, a `cx.Statistic`) by name.
    better: "min" or "max" by name, for the metrics of `extra` that a run may watch: `{"top2": "max"}`.
    ignore_index: a label that is left out of accuracy, as in the loss. labels: (output, target) -> (logits,
    labels). means: how many means the loss may have besides the mean over samples.
    Raises: ConfigError for a metric named loss or grad_norm, or a direction other than "min" and "max".
    """

    def __init__(
        self,
        extra: Mapping[str, Any] | None = None,
        *,
        better: Mapping[str, str] | None = None,
        ignore_index: int | None = None,
        labels: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda output, target: (output, target),
        means: int = 0,
    ):
        self.own, self.own_better = dict(extra or {}), dict(better or {})
        self.ignore_index, self.labels = ignore_index, labels
        self._first = 1 + means  # rows of the loss
        hit = lambda output, target: accuracy(*self.labels(output, target), ignore_index)  # noqa: E731
        self._measures = [
            Packed(name, metric if isinstance(metric, Statistic) else _mean_of(name, metric))
            for name, metric in {"accuracy": hit, **self.own}.items()
        ]
        taken, ways, known = {"loss", GRAD_NORM} & {*self.own}, {*self.own_better.values()}, {*self.own}
        # `names` evaluates every statistic on no samples: only do so for a name that is not in `extra`.
        unknown = not taken and not {*self.own_better} <= known and not {*self.own_better} <= {*self.names}
        if taken or not ways <= {"min", "max"} or unknown:
            raise ConfigError(
                f"metrics {sorted(self.own)} with better={self.own_better}: 'loss' and 'grad_norm' are "
                "always measured, and better maps names of metrics to 'min' or 'max'. HINT: write "
                "Metrics({'top2': f}, better={'top2': 'max'})."
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers that are measured."""
        return ("loss", *(name for measure in self._measures for name in measure.names))

    @cached_property
    def better(self) -> dict[str, str]:
        """name -> "min" or "max", for the numbers whose direction is known."""
        known = {"loss": "min", "accuracy": "max"}
        for measure in self._measures:
            if way := self.own_better.get(measure.name) or measure.statistic.better:
                known |= dict.fromkeys(measure.names, way)
        return known | self.own_better

    @cached_property
    def num_rows(self) -> int:
        """Number of rows of `sums`: one for a mean, one for every two numbers of a statistic."""
        return self._first + sum(measure.num_rows for measure in self._measures)

    @property
    def num_training_rows(self) -> int:
        """Number of rows in training: those of `sums`, and one for the norm of the mean gradients."""
        return self.num_rows + 1

    @cached_property
    def row_names(self) -> list[str]:
        """The metric that each row belongs to in training."""
        measured = [name for measure in self._measures for name in [measure.name] * measure.num_rows]
        return ["loss"] * self._first + measured + [GRAD_NORM]

    def arranged(self, sums: np.ndarray, row_names: Sequence[str]) -> np.ndarray:
        """The `sums` of training with other metrics as sums of these; zeros for a metric that is new, or has
        another number of rows.

        row_names: of the other metrics.
        """
        then, now = np.array(row_names), np.array(self.row_names)
        made = np.zeros((len(now), 2))
        if len(then) != len(sums):  # a checkpoint that does not name its rows, and a metric has others now
            return made
        for name in dict.fromkeys(self.row_names):
            if (then == name).sum() == (now == name).sum():
                made[now == name] = sums[then == name]
        return made

    def sums(self, losses: Losses, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        """float32 (num_rows, 2): the weighted sum and weight of each mean, the numbers of each statistic."""
        first = loss_rows(losses, weight, self._first)
        return jnp.concatenate([first, *(m.rows(output, target, weight) for m in self._measures)])

    def check_merges(self) -> None:
        """Returns if the states of all statistics add up. Raises: ConfigError naming one that does not."""
        for measure in self._measures:
            if measure.statistic.merge is not jnp.add:
                measure.check_merge()

    def settled(self, sums: jax.Array) -> jax.Array:
        """`sums` of one step over all replicas, with a loss of several means joined into the first row.

        The loss of an epoch is then the mean over its steps, weighted by their samples that count.
        """
        if self._first == 1:
            return sums
        apart = sums[1 : self._first]
        loss = jnp.where(apart[:, 1] != 0, apart[:, 0] / jnp.where(apart[:, 1] != 0, apart[:, 1], 1.0), 0.0)
        sums = sums.at[0, 0].add(sums[0, 1] * loss.sum())
        return sums.at[1 : self._first].set(0.0)

    def means(self, sums: np.ndarray) -> dict[str, Any]:
        """name -> number, or array for a statistic that gives one; NaN where nothing was counted.

        sums: num_rows or num_training_rows rows; a gradient norm that was not measured is left out.
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
        """`means` over all samples of `what`. Raises: DataError where all weights in the loss are 0."""
        if not sums[: self._first, 1].any():
            raise DataError(
                f"no sample of {what} counts in the loss: every weight is 0 or every label is ignored. "
                "HINT: check ignore_index, class weights and masks."
            )
        return self.means(sums)


def numbers(means: Mapping[str, Any]) -> dict[str, float]:
    """The entries of `Metrics.means` that are numbers, not arrays."""
    return {name: value for name, value in means.items() if not isinstance(value, np.ndarray)}


def metrics_of(loss: Any, given: Metrics | Mapping[str, Any] | None) -> Metrics:
    """The metrics of a run: those of `loss`, if it is a task, and those `given`.

    Accuracy leaves out the label that `loss` ignores, or, if it ignores none, the one of `given`.
    Raises: ConfigError if `given` is neither a `Metrics` nor a dict of functions by name.
    """
    given = Metrics(given) if isinstance(given, Mapping) else given
    if given and not isinstance(given, Metrics):
        raise ConfigError(
            f"metrics: expected a cx.Metrics, got {type(given).__name__}. HINT: pass cx.Metrics({{'name': "
            "function}); loss and accuracy are always measured."
        )
    given, ignored = given or Metrics(), getattr(loss, "ignore_index", None)
    ignored = given.ignore_index if ignored is None else ignored
    made = Metrics(given.own, better=given.own_better, ignore_index=ignored, labels=given.labels)
    return loss.to_metrics(made) if hasattr(loss, "to_metrics") else made
