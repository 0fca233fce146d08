"""When a run saves, and when it stops."""

import math
import time
from collections.abc import Callable
from typing import Any

from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.stop_reasons import CALLBACK, MAX_STEPS, MAX_TIME, StopReason, strongest
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState, SavingHook, StepInfo
from cyxjax.train.settings import SavePolicy

LAST_SAVE_S, HURRIED_SAVE_S = 30.0, 8.0
"""How long the last save is retried: after a run that finished, and after a stop, which may come from a
signal with a deadline."""


class CheckpointHook(SavingHook):
    """Saves the run at intervals of epochs, steps or minutes, on request, and at its end."""

    def __init__(
        self,
        checkpointer: Any,
        describe: Callable[[RunState], dict[str, Any]],
        policy: SavePolicy,
        *,
        measured: Callable[[EpochInfo], float | None],
        requested: Callable[[], bool],
        portable: Callable[[Any], Any],
    ):
        self._checkpointer, self._describe, self._portable = checkpointer, describe, portable
        self._policy, self._measured, self._requested = policy, measured, requested
        self._saved_at = time.monotonic()

    def on_start(self, moment: RunState) -> None:
        if self._policy.saves:  # a callback's state that cannot be stored is an error before training
            self._describe(moment)
        self._saved = moment.position
        self._newest = -1, 0.0  # the step of the newest value, and the value

    def ask(self) -> tuple[float, bool]:
        # Each rank asks by its own clock; when one asks, all save.
        every_s = 60 * self._policy.every_minutes
        late = bool(every_s) and time.monotonic() - self._saved_at > every_s
        return 0.0, late or self._requested()

    def saves_at(self, position: Position) -> bool:
        epochs, steps = self._policy.every_epochs, self._policy.every_steps
        by_epochs = epochs and not position.step_in_epoch and not position.epoch % epochs
        by_steps = steps and not position.step % steps
        return bool(by_epochs or by_steps)

    def on_epoch(self, info: EpochInfo) -> None:
        if (value := self._measured(info)) is not None:
            self._newest = info.position.step, value

    on_evaluation = on_epoch

    def on_state(self, moment: RunState) -> None:
        state = self._portable(moment.state)
        step = moment.position.step
        at, value = self._newest
        metric = value if at == step and math.isfinite(value) else None
        self._checkpointer.save(step, state, self._describe(moment), metric)
        self._saved_at, self._saved = time.monotonic(), moment.position

    def on_end(self, moment: RunState, finished: bool) -> None:
        self._checkpointer.forgive()
        if self._policy.saves and moment.position != self._saved:
            self.on_state(moment)
        patience_s = LAST_SAVE_S if finished else HURRIED_SAVE_S
        self._checkpointer.finish(patience_s, lambda: report_progress(moment.position.step, "checkpoint"))


class HandOutHook(Hook):
    """Copies the trained values into a model that holds values, before callbacks see an epoch."""

    def __init__(self, hand_out: Callable[[], None]):
        self._hand_out = hand_out

    def on_epoch(self, info: EpochInfo) -> None:
        self._hand_out()

    on_evaluation = on_epoch


class StopHook(Hook):
    """Asks to stop after a signal, or `max_time_s` seconds after this hook was created. All ranks stop at
    the same step. If a rollback comes before the stop, it asks again.

    Records in the history why a run ended early, also if the loop ended it: at `max_steps`, or because a
    callback asked for it outside of a step.
    """

    def __init__(
        self,
        history: DistributedTrainingHistory,
        signalled: Callable[[], StopReason | None],
        max_time_s: float | None,
        max_steps: int | None = None,
    ):
        self._history, self._signalled, self._max_time_s = history, signalled, max_time_s
        self._max_steps, self._started, self._told = max_steps, time.monotonic(), 0.0

    def ask(self) -> tuple[float, bool]:
        if (reason := self._signalled()) is not None:
            return reason.sent, False
        late = self._max_time_s is not None and time.monotonic() - self._started > self._max_time_s
        return max(MAX_TIME.sent * late, self._told), False

    def on_step(self, info: StepInfo) -> None:
        # Clocks differ between ranks, so no rank decides by its own: the sum over all is the same on each.
        if info.signals[0] and not self._history.stopped_by:
            reason = strongest(info.signals[0])
            self._history.stopped_by, self._told = reason.name, reason.sent

    def on_end(self, moment: RunState, finished: bool) -> None:
        reached = self._max_steps is not None and moment.position.step >= self._max_steps
        if not finished and not self._history.stopped_by:
            self._history.stopped_by = (MAX_STEPS if reached else CALLBACK).name
