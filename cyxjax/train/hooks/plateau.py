"""Waits for a metric to improve: shared by callbacks that stop, save or lower the learning rate."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cyxjax.errors import ConfigError
from cyxjax.observe.history import curve
from cyxjax.train.hooks.hook import RunState
from cyxjax.train.monitor import Monitor, Watchable


class RunParts(NamedTuple):
    """What a run lends its callbacks."""

    history: Any  # DistributedTrainingHistory, filled epoch by epoch
    watchable: Watchable  # the metrics a callback may wait for
    save: Callable[[str, RunState], None]  # (path, moment) -> a checkpoint there; called on all ranks


class Plateau:
    """Counts evaluations without a better value: lower or higher, as `mode` or else the metric says."""

    def __init__(self, patience: int, monitor: str, min_delta: float, mode: str | None, wanted: bool = True):
        if patience < 1 or not min_delta >= 0:
            raise ConfigError(
                f"{patience=}, {min_delta=}: patience is 1 or more evaluations, min_delta 0 or more. "
                "HINT: patience=3 waits for three evaluations without improvement."
            )
        self.patience, self._name, self._mode, self._wanted = patience, monitor, mode, wanted
        self.min_delta = min_delta
        self.restart()

    def watch(self, watchable: Watchable) -> None:
        """Looks up what it waits for. Raises: ConfigError where the run has no such metric."""
        self.monitor: Monitor = watchable.find(self._name, self._mode, wanted=self._wanted)

    def seen(self, run: RunParts) -> list[float]:
        """The values so far, of a run that goes on."""
        self.watch(run.watchable)
        return curve(run.history, self.monitor.name)

    def restart(self) -> None:
        self.best, self.waited = math.inf, 0

    def improves(self, value: float) -> bool:
        """Whether `value` is the best so far; counts it."""
        score = self.monitor.score(value)
        better = score < self.best - self.min_delta
        self.best, self.waited = (score, 0) if better else (self.best, self.waited + 1)
        return better

    def spent(self) -> bool:
        return self.waited >= self.patience
