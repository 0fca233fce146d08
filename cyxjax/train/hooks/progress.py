"""Hooks that record a run. Each receives values (`StepInfo`, `RunState`, ...), never the trainer."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cyxjax.core.metrics import GRAD_NORM, Metrics, numbers
from cyxjax.launch import heartbeat
from cyxjax.observe.console import Console
from cyxjax.observe.events import Events
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState, SavingHook, StepInfo

Rate = Callable[[int], float | None]
"""steps so far -> learning rate of the newest update; None if it is not known"""


def _rate_entry(rate: float | None) -> dict[str, float]:
    """The entry of a record; empty if the rate is not known."""
    return {} if rate is None else {"learning_rate": rate}


def _add(values: list[Any], newest: Any, epochs: list[int], missing: Any) -> None:
    """Appends the entry of the last of `epochs`, after one for each earlier epoch that has none."""
    values += [missing] * (len(epochs) - 1 - len(values)) + [newest]


_LEAST_S = 0.1


def _training_s() -> float:
    """Seconds that this process has spent in steps and in waiting for data."""
    spent = heartbeat.spent()
    return spent.get("step", 0.0) + spent.get("data", 0.0)


class HistoryHook(SavingHook):
    """Fills the history: one entry per epoch and evaluation; totals at each, at saves and at the end.

    Time is counted from the creation of this hook.
    """

    def __init__(self, history: DistributedTrainingHistory, learning_rate: Rate):
        self._history, self._rate = history, learning_rate
        self._before_s, self._started = history.total_time_seconds, time.monotonic()
        # Samples of earlier processes of this run: their rate times their time.
        self._samples = history.samples_per_second * self._before_s

    def on_start(self, moment: RunState) -> None:
        self._at = moment.position

    def on_step(self, info: StepInfo) -> None:
        self._samples += info.position.samples_since(self._at)
        self._at = info.position
        self._history.skipped_steps += info.left_out

    def on_epoch(self, info: EpochInfo) -> None:
        self.add_row(info)
        self._totals(info.position)

    def add_row(self, info: EpochInfo) -> None:
        """Adds the entry of an epoch, also of one that `max_steps` cut short."""
        h = self._history
        h.epochs.append(info.position.epoch - 1)
        h.steps.append(info.position.step)
        h.train_losses.append(info.train["loss"])
        h.train_accuracies.append(info.train["accuracy"])
        if (rate := self._rate(info.position.step)) is not None:
            _add(h.learning_rates, rate, h.epochs, math.nan)
        self._evaluated(info, info.position.epoch - 1)
        if GRAD_NORM in info.train:
            h.grad_norm_epochs.append(info.position.epoch - 1)
            h.grad_norms.append(info.train[GRAD_NORM])
        self._own("train", info.train, h.epochs)

    def on_evaluation(self, info: EpochInfo) -> None:
        self._evaluated(info, info.position.epoch)
        self._totals(info.position)

    def _evaluated(self, info: EpochInfo, epoch: int) -> None:
        if info.val:
            h = self._history
            h.val_epochs.append(epoch)
            h.val_steps.append(info.position.step)
            h.val_losses.append(info.val["loss"])
            h.val_accuracies.append(info.val["accuracy"])
            self._own("val", info.val, h.val_epochs)

    def _own(self, split: str, means: dict[str, Any], epochs: list[int]) -> None:
        for name in [name for name in means if name not in ("loss", "accuracy", GRAD_NORM)]:
            kept = means[name].tolist() if isinstance(means[name], np.ndarray) else means[name]
            _add(self._history.metrics.setdefault(f"{split}_{name}", []), kept, epochs, None)

    def on_state(self, moment: RunState) -> None:
        self._totals(moment.position)

    def seconds(self) -> float:
        """Seconds of training so far, including earlier processes of this run."""
        return self._before_s + time.monotonic() - self._started

    def _totals(self, position: Position) -> None:
        seconds = self.seconds()
        self._history.total_time_seconds = seconds
        self._history.samples_per_second = self._samples / max(seconds, 1e-9)
        self._history.num_steps = position.step


class RecordHook(Hook):
    """Turns numbers into records for the console and the sinks, every `every` steps and after each epoch."""

    def __init__(
        self,
        console: Console,
        sink: Sink,
        metrics: Metrics,
        every: int,
        learning_rate: Rate,
        total_seconds: Callable[[], float],
        best: Callable[[], str] = lambda: "",  # the monitored metric, if its newest value is the best
    ):
        self._best, self._total_seconds = best, total_seconds
        self._console, self._sink, self._metrics = console, sink, metrics
        self._every, self._rate, self._begun, self._per_second = every, learning_rate, False, 0.0
        # of a checkpoint: its step and epoch, the sums of the record in progress, and when the epoch began
        self._stored: tuple[tuple[int, int], np.ndarray, float] = (-1, 0), np.zeros(2), 0.0

    def on_start(self, moment: RunState) -> None:
        if self._begun:  # the records of later steps are of steps that were undone
            self._sink.log({"kind": "rollback", **_place(moment)})
        else:
            self._epoch_began_s = self._total_seconds()
        self._begun, self._at = True, moment.position
        self._sums = np.zeros((self._metrics.num_training_rows, 2))
        at, sums, began_s = self._stored
        # After a rollback the run may continue in a later epoch than that of the checkpoint.
        if at == self._at[:2]:
            self._sums += sums
            self._epoch_began_s = began_s
        self._begin_rate()

    def state_dict(self) -> tuple[tuple[int, int], np.ndarray, list[str], float]:
        return self._at[:2], self._sums, self._metrics.row_names, self._epoch_began_s

    def load_state_dict(self, state: tuple[tuple[int, int], np.ndarray, list[str], float]) -> None:
        at, sums, row_names, began_s = state
        self._stored = at, self._metrics.arranged(sums, row_names), began_s

    def on_step(self, info: StepInfo) -> None:
        self._sums += info.sums
        self._samples += info.position.samples_since(self._at)
        self._at = info.position
        if info.position.step_in_epoch % self._every:
            return
        record = {
            "step": info.position.step,
            "epoch": info.position.epoch,
            "batch": info.position.step_in_epoch,
            **self._known(self._metrics.means(self._sums)),
            **_rate_entry(self._rate(info.position.step)),
            "samples_per_second": self._samples_per_second(),
        }
        self._sums.fill(0)
        self._console.step(record)
        self._log(record)

    def on_epoch(self, info: EpochInfo) -> None:
        record = {
            "step": info.position.step,
            "epoch": info.position.epoch - 1,
            **{f"train_{name}": value for name, value in self._known(info.train).items()},
            **{f"val_{name}": value for name, value in self._known(info.val).items()},
            **_rate_entry(self._rate(info.position.step)),
            "seconds": self._total_seconds() - self._epoch_began_s,
        }
        self._sums.fill(0)
        self._at, self._epoch_began_s = info.position, self._total_seconds()
        self._console.epoch(record, self._best() if info.val else "")
        self._log(record)

    def on_evaluation(self, info: EpochInfo) -> None:
        record = {
            "step": info.position.step,
            "epoch": info.position.epoch,
            "batch": info.position.step_in_epoch,
            **{f"val_{name}": value for name, value in self._known(info.val).items()},
        }
        self._console.epoch(record)
        self._log(record)

    def _samples_per_second(self) -> float:
        """Samples per second in steps and in waiting for data: not in compiling, evaluating and saving.

        The numbers of several steps arrive together, and the time between two of them is no measure: a rate
        is of at least `_LEAST_S`, also over epochs, and holds until the next one.
        """
        elapsed = _training_s() - self._since_s
        if elapsed > _LEAST_S:
            self._per_second = self._samples / elapsed
            self._begin_rate()
        return self._per_second or self._samples / max(elapsed, 1e-9)

    def _begin_rate(self) -> None:
        self._since_s, self._samples = _training_s(), 0

    def _log(self, record: dict[str, Any]) -> None:
        self._sink.log(record | {"total_time_seconds": self._total_seconds()})

    def _known(self, means: dict[str, float]) -> dict[str, float]:
        """The numbers among `means`, without NaN metrics (accuracy of a regression); a NaN loss is kept."""
        return {n: v for n, v in numbers(means).items() if n == "loss" or not math.isnan(v)}


class EventsHook(SavingHook):
    """Logs events. It runs on every rank, so that all ask for the same states; one rank keeps the log.

    facts: what a start event holds besides its position. starts_over: see `Events.begin`. Comes after the
    hook that saves.
    """

    def __init__(self, events: Events, facts: Callable[[], dict[str, Any]], starts_over: bool):
        self._events, self._facts, self._starts_over, self._begun = events, facts, starts_over, False

    def on_start(self, moment: RunState) -> None:
        if self._begun:
            self._events.log("rollback", **_place(moment))
        else:
            self._events.begin(moment.position.step, self._starts_over)
            self._events.log("start", **_place(moment), **self._facts())
        self._begun = True

    def on_state(self, moment: RunState) -> None:
        self._events.log("save", **_place(moment))

    def on_end(self, moment: RunState, finished: bool) -> None:
        self._events.log("end", **_place(moment), finished=finished)


def _place(moment: RunState) -> dict[str, int]:
    return {"step": moment.position.step, "epoch": moment.position.epoch}
