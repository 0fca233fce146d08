"""The monitored metric of a run: its name, whether low or high is better, and how long it did not improve.

`train_loss`, `val_accuracy`, and any metric of the user's under the same two prefixes.
"""

import math
from typing import Literal, NamedTuple

from cyxjax.core.metrics import Metrics
from cyxjax.errors import ConfigError, nearest
from cyxjax.observe.history import DistributedTrainingHistory, curve, not_undone
from cyxjax.train.hooks.hook import EpochInfo, Feed
from cyxjax.train.settings import Course, Watch


class Monitor(NamedTuple):
    """A monitored metric, and whether low or high values are better."""

    name: str
    mode: Literal["min", "max"]

    def score(self, value: float) -> float:
        """`value` with its sign chosen so that lower is better."""
        return -value if self.mode == "max" else value

    def of(self, info: EpochInfo) -> float | None:
        """The value of an epoch or evaluation; None if it was not measured."""
        split, _, name = self.name.partition("_")
        return (info.train if split == "train" else info.val).get(name)

    def up_to(self, history: DistributedTrainingHistory, step: int) -> list[float]:
        """The values of a run that continues from `step`, without those that a rollback undid."""
        return not_undone(curve(history, self.name), step)

    def is_best(self, history: DistributedTrainingHistory) -> bool:
        """Whether the newest value is finite, and better than all before it that count."""
        *before, last = [self.score(value) for value in not_undone(curve(history, self.name))] or [math.nan]
        return math.isfinite(last) and all(last < value for value in before if math.isfinite(value))


class Watchable(NamedTuple):
    """The metrics that a run measures."""

    metrics: Metrics
    validates: bool = True  # whether epochs are evaluated on validation data

    def of(self, watch: Watch) -> Monitor:
        """The monitor of `watch`; early stopping needs its values. Raises: ConfigError."""
        return self.find(watch.monitor, watch.mode, wanted=watch.patience is not None)

    def find(self, name: str, mode: str | None = None, *, wanted: bool = True) -> Monitor:
        """The monitor `name`; mode None: the way the metric itself says.

        wanted: whether its values are needed, so that a run without validation data is refused.
        Raises: ConfigError for a metric that is not measured, and without "min" or "max".
        """
        splits = ("train", "val") if self.validates or not wanted else ("train",)
        known = [f"{split}_{metric}" for split in splits for metric in self.metrics.names]
        if name not in known:
            raise ConfigError(
                f"monitor={name!r} is not measured in this run; val_... needs validation data and "
                f"evaluations. HINT: {nearest(name, known)}",
                key="monitor",
            )
        metric = name.partition("_")[2]
        better = mode or self.metrics.better.get(metric)
        if better not in ("min", "max"):
            raise ConfigError(
                f"monitor={name!r}: mode={better!r}, expected 'min' or 'max'. HINT: mode='max' if higher is "
                f"better, or Metrics({{...}}, better={{{metric!r}: 'max'}})."
            )
        return Monitor(name, "max" if better == "max" else "min")


def watchable_in(metrics: Metrics, feed: Feed, course: Course) -> Watchable:
    """What a run over `feed` measures."""
    return Watchable(metrics, feed.val is not None and any(course.evaluations))


class Plateau:
    """Counts evaluations without a better value: lower or higher, as `mode`, or else the metric, says."""

    def __init__(self, patience: int, monitor: str, min_delta: float, mode: str | None, wanted: bool = True):
        self.patience, self._name, self._mode, self._wanted = patience, monitor, mode, wanted
        self.min_delta = min_delta
        self.restart()

    def watch(self, watchable: Watchable) -> None:
        """Looks up its metric. Raises: ConfigError if the run has no such metric."""
        self.monitor: Monitor = watchable.find(self._name, self._mode, wanted=self._wanted)

    def restart(self) -> None:
        self.best, self.waited = math.inf, 0

    def improves(self, value: float) -> bool:
        """Counts `value`. Returns whether it is the best so far."""
        score = self.monitor.score(value)
        better = score < self.best - self.min_delta
        self.best, self.waited = (score, 0) if better else (self.best, self.waited + 1)
        return better

    def spent(self) -> bool:
        return self.waited >= max(self.patience, 1)
