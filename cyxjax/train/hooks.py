"""The parts that watch a run. Each is told values (`StepInfo`, `EpochInfo`, `Moment`), never the trainer."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cyxjax.core.metrics import Metrics
from cyxjax.errors import CyxjaxError
from cyxjax.observe.console import Console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink
from cyxjax.train.loop import EpochInfo, Hook, Moment, Position, StepInfo

Rate = Callable[[int], float]
"""optimizer steps done -> learning rate of the last of them"""


class BadStepError(CyxjaxError, RuntimeError):
    """Training should not go on from the step that led to `position`.

    good_step: the newest step whose state is sound, as far as is known. brief: what happened, in a clause.
    """

    def __init__(self, text: str, position: Position, good_step: int, brief: str) -> None:
        super().__init__(text)
        self.position, self.good_step, self.brief = position, good_step, brief


class NonFiniteError(BadStepError):
    """The loss or the gradients became NaN or infinite in the step that led to `position`."""

    def __init__(self, text: str, position: Position) -> None:
        # Where it is of use to go back, such steps are left out: every state that was saved is sound.
        super().__init__(text, position, position.step, f"step {position.step} was not finite")


class HistoryHook(Hook):
    """Fills the history: one entry an epoch, and the totals at the end."""

    def __init__(self, history: DistributedTrainingHistory, learning_rate: Rate):
        self._history, self._rate = history, learning_rate
        self._before_s, self._samples = history.total_time_seconds, 0.0
        self._started = time.monotonic()

    def on_start(self, moment: Moment) -> None:
        # Samples of earlier processes of this run: their rate times their time.
        self._samples = self._history.samples_per_second * self._before_s
        self._started = time.monotonic()

    def on_step(self, info: StepInfo) -> None:
        self._samples += info.sums[0, 1]

    def on_epoch(self, info: EpochInfo) -> None:
        h = self._history
        h.epochs.append(info.position.epoch - 1)
        h.train_losses.append(info.train["loss"])
        h.train_accuracies.append(info.train["accuracy"])
        h.learning_rates.append(self._rate(info.position.step))
        if info.val:
            h.val_epochs.append(info.position.epoch - 1)
            h.val_losses.append(info.val["loss"])
            h.val_accuracies.append(info.val["accuracy"])
        self._totals(info.position)

    def on_state(self, moment: Moment) -> None:
        self._totals(moment.position)

    def on_end(self, moment: Moment, finished: bool) -> None:
        self._totals(moment.position)

    def _totals(self, position: Position) -> None:
        seconds = self._before_s + time.monotonic() - self._started
        self._history.total_time_seconds = seconds
        self._history.samples_per_second = self._samples / max(seconds, 1e-9)
        self._history.num_steps = position.step


class RecordHook(Hook):
    """Turns numbers into records for the console and the sinks: every so many steps, and each epoch."""

    def __init__(self, console: Console, sink: Sink, metrics: Metrics, every: int, learning_rate: Rate):
        self._console, self._sink, self._metrics = console, sink, metrics
        self._every, self._rate = every, learning_rate
        self._sums, self._since = np.zeros((len(metrics.names), 2)), time.monotonic()
        self._epoch_started = self._since

    def on_start(self, moment: Moment) -> None:
        self._reset()
        self._epoch_started = time.monotonic()

    def on_step(self, info: StepInfo) -> None:
        self._sums = self._sums + info.sums
        if info.position.step_in_epoch % self._every:
            return
        record = {
            "step": info.position.step,
            "epoch": info.position.epoch,
            "batch": info.position.step_in_epoch,
            **self._known(self._metrics.means(self._sums)),
            "learning_rate": self._rate(info.position.step),
            "samples_per_second": self._sums[0, 1] / max(time.monotonic() - self._since, 1e-9),
        }
        self._reset()
        self._console.step(record)
        self._sink.log(record)

    def on_epoch(self, info: EpochInfo) -> None:
        record = {
            "step": info.position.step,
            "epoch": info.position.epoch - 1,
            **{f"train_{name}": value for name, value in self._known(info.train).items()},
            **{f"val_{name}": value for name, value in self._known(info.val).items()},
            "learning_rate": self._rate(info.position.step),
            "seconds": time.monotonic() - self._epoch_started,
        }
        self._reset()
        self._epoch_started = time.monotonic()
        self._console.epoch(record)
        self._sink.log(record)

    def _reset(self) -> None:
        self._sums, self._since = np.zeros((len(self._metrics.names), 2)), time.monotonic()

    def _known(self, means: dict[str, float]) -> dict[str, float]:
        """Without metrics that mean nothing here (accuracy of a regression); a NaN loss is shown."""
        return {n: v for n, v in means.items() if n == "loss" or not math.isnan(v)}


class CheckpointHook(Hook):
    """Saves the run: by epochs, steps, minutes, on request, and at its end."""

    def __init__(
        self,
        checkpointer: Any,
        describe: Callable[[Moment], dict[str, Any]],
        *,
        every_epochs: int,
        every_steps: int,
        every_minutes: float,
        metric: Callable[[], float | None],
        requested: Callable[[], bool] = lambda: False,
        portable: Callable[[Any], Any] = lambda state: state,
    ):
        self._checkpointer, self._describe, self._metric = checkpointer, describe, metric
        self._portable = portable
        self._every_epochs, self._every_steps, self._every_s = every_epochs, every_steps, 60 * every_minutes
        self._requested, self._saved_at, self._saved_step = requested, time.monotonic(), -1

    def on_start(self, moment: Moment) -> None:
        self._saved_step = moment.position.step

    def ask(self) -> tuple[float, bool]:
        late = bool(self._every_s) and time.monotonic() - self._saved_at > self._every_s
        return 0.0, late or self._requested()

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        by_epochs = (
            self._every_epochs and not position.step_in_epoch and not position.epoch % self._every_epochs
        )
        by_steps = self._every_steps and not position.step % self._every_steps
        return bool(asked_to_save or by_epochs or by_steps)

    def on_state(self, moment: Moment) -> None:
        state = self._portable(moment.state)
        self._checkpointer.save(moment.position.step, state, self._describe(moment), self._metric())
        self._saved_at, self._saved_step = time.monotonic(), moment.position.step

    def on_end(self, moment: Moment, finished: bool) -> None:
        regular = self._every_epochs or self._every_steps or self._every_s
        if regular and moment.position.step != self._saved_step:
            self.on_state(moment)
        self._checkpointer.wait()


class StopHook(Hook):
    """Asks to stop, once: when a signal came, or when the time is up. All ranks stop at one step."""

    def __init__(
        self, history: DistributedTrainingHistory, signalled: Callable[[], bool], max_time_s: float | None
    ):
        self._history, self._signalled, self._max_time_s = history, signalled, max_time_s

    def on_start(self, moment: Moment) -> None:
        self._started = time.monotonic()

    def ask(self) -> tuple[float, bool]:
        if self._signalled():
            return 1.0, False
        late = self._max_time_s is not None and time.monotonic() - self._started > self._max_time_s
        return _OUT_OF_TIME * late, False

    def on_step(self, info: StepInfo) -> None:
        # Clocks differ between ranks, so none judges by its own: the sum over all says the same to each.
        if info.signals[0] and not self._history.stopped_by:
            self._history.stopped_by = "signal" if info.signals[0] >= 1 else "max_time"


_OUT_OF_TIME = 2.0**-20  # exact in float32, and below 1 when a million replicas add it up


class TerminateOnNaN(Hook):
    """Ends the run with an error when a step's loss is NaN or infinite, or when so many steps in a row were
    left out that no loss scale is to blame; equal on all ranks."""

    def __init__(self, patience: int = 50) -> None:
        self._patience = patience  # steps left out in a row

    def on_start(self, moment: Moment) -> None:
        self._left_out = 0

    def on_step(self, info: StepInfo) -> None:
        self._left_out = 0 if info.sums[0, 1] else self._left_out + 1
        if self._left_out >= self._patience:
            raise NonFiniteError(
                f"the gradients of the last {self._left_out} steps, up to {info.position.step}, were not "
                "finite and all were left out. HINT: look for NaN in the data, or train in bfloat16.",
                info.position,
            )
        loss = info.sums[0, 0] / max(info.sums[0, 1], 1)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss of step {info.position.step} (epoch {info.position.epoch}) is {loss}. "
                "HINT: lower the learning rate, set max_grad_norm, or look for NaN in the data; "
                "the last checkpoint is good.",
                info.position,
            )


def monitored(monitor: str, info: EpochInfo) -> float | None:
    """The value `monitor` names; None in an epoch that was not evaluated."""
    split, _, name = monitor.partition("_")
    return (info.train if split == "train" else info.val).get(name)
