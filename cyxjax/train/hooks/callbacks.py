"""Hooks that a user passes to a trainer: `DistributedTrainer(..., callbacks=[EarlyStopping(3), EMA(0.999)])`.

A callback is a hook with two more methods. `around` adds a part to the optimizer, for what must act inside
the compiled step; `evaluated` chooses what evaluation sees. Callbacks that wait for a metric to improve read
the history again at each start, so a resumed run waits as long as an uninterrupted one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import optax

from cyxjax.core.optimizer import (
    averaged_params,
    learning_rate_factor,
    set_learning_rate_factor,
    with_parameter_average,
)
from cyxjax.core.step import TrainState
from cyxjax.observe.history import curve
from cyxjax.observe.stop_reasons import EARLY_STOPPING
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState
from cyxjax.train.monitor import Plateau, Watchable

Optimizer: TypeAlias = optax.GradientTransformation


class RunParts(NamedTuple):
    """What a run gives its callbacks."""

    history: Any  # DistributedTrainingHistory, filled epoch by epoch
    step: int  # at which it begins
    watchable: Watchable  # the metrics a callback may wait for
    save: Callable[[str, RunState], None]
    """(path, moment): saves a checkpoint; called on all ranks. A relative path is below the run folder in an
    experiment."""


class Callback(Hook):
    """A hook that may also take part in the compiled step, and in what evaluation sees."""

    changes_learning_rate = False
    """Whether `next_state` may set the learning rate's factor in the optimizer's state: one factor, which all
    such callbacks of a trainer share."""

    def around(self, optimizer: Optimizer) -> Optimizer:
        """`optimizer` with what this callback adds to its updates or its state."""
        return optimizer

    def evaluated(self, state: TrainState) -> TrainState:
        """The state that evaluation, `predict` and `params` see, given the state that trains."""
        return state

    def learning_rate_factor(self) -> float:
        """The factor that `next_state` set; called only if `changes_learning_rate`."""
        return 1.0

    def check(self, watchable: Watchable) -> None:
        """Called before a fit writes anything, and before `begin`. Raises: ConfigError if the run lacks what
        it needs.
        """

    def begin(self, run: RunParts) -> None:
        """Called before each start: of a fit, and after a rollback."""


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in which `monitor` did not improve by `min_delta`.

    given: (patience, monitor, min_delta, mode), or as in Keras and Lightning (monitor, min_delta, patience).
    mode: "min" or "max", whichever values of the monitor are better; None: as the metric says.
    """

    def __init__(
        self,
        *given: Any,
        patience: int = 3,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        mode: str | None = None,
    ):
        named: dict[str, Any] = {
            "patience": patience,
            "monitor": monitor,
            "min_delta": min_delta,
            "mode": mode,
        }
        self._plateau = Plateau(**named | _by_name(given, list(named), ["monitor", "min_delta", "patience"]))

    def check(self, watchable: Watchable) -> None:
        self._plateau.watch(watchable)

    def begin(self, run: RunParts) -> None:
        self._history = run.history
        self._plateau.restart()
        for value in self._plateau.monitor.up_to(run.history, run.step):
            self._plateau.improves(value)

    def on_start(self, moment: RunState) -> bool:
        return self._stops()  # a run that was stopped this way and is started again

    def on_epoch(self, info: EpochInfo) -> bool:
        value = self._plateau.monitor.of(info)
        if value is not None:
            self._plateau.improves(value)
        return self._stops()

    def _stops(self) -> bool:
        if self._plateau.spent():
            self._history.stopped_by = EARLY_STOPPING.name
        return self._plateau.spent()

    on_evaluation = on_epoch


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rate by `factor` if `monitor` did not improve in `patience` evaluations.

    The factor is a number in the optimizer's state, so the step is not recompiled. It multiplies the rate
    from scaling, warm-up and schedule, and does not fall below `min_factor`. All callbacks of a trainer that
    change it share it, as torch's schedulers share a rate. `min_delta` is absolute; mode: see EarlyStopping.
    (torch's scheduler of this name waits one epoch longer.)
    given: (factor, patience, monitor, ...), or as in Keras (monitor, factor, patience).
    """

    changes_learning_rate = True

    def __init__(
        self,
        *given: Any,
        factor: float = 0.1,
        patience: int = 10,
        monitor: str = "val_loss",
        min_delta: float = 1e-4,
        min_factor: float = 0.0,
        mode: str | None = None,
    ):
        named: dict[str, Any] = {
            "factor": factor,
            "patience": patience,
            "monitor": monitor,
            "min_delta": min_delta,
            "min_factor": min_factor,
            "mode": mode,
        }
        named |= _by_name(given, list(named), ["monitor", "factor", "patience"])
        self._factor, self._min_factor = named.pop("factor"), named.pop("min_factor")
        self._plateau, self._current = Plateau(**named), 1.0

    def check(self, watchable: Watchable) -> None:
        self._plateau.watch(watchable)

    def learning_rate_factor(self) -> float:
        return self._current

    def begin(self, run: RunParts) -> None:
        self._plateau.restart()
        for value in self._plateau.monitor.up_to(run.history, run.step):
            self._is_spent_with(value)

    def on_start(self, moment: RunState) -> None:
        self._current = learning_rate_factor(moment.state)  # from the checkpoint, if it resumes from one

    def next_state(self, info: EpochInfo, state: TrainState) -> TrainState:
        value = self._plateau.monitor.of(info)
        if value is not None and self._is_spent_with(value):
            before = learning_rate_factor(state)
            floor = min(self._min_factor, before)  # another callback may have gone below it
            state = set_learning_rate_factor(state, max(before * self._factor, floor))
        self._current = learning_rate_factor(state)  # another callback may have changed it
        return state

    def _is_spent_with(self, value: float) -> bool:
        """Whether the patience runs out with `value`; it then starts over."""
        spent = not self._plateau.improves(value) and self._plateau.spent()
        if spent:
            self._plateau.waited = 0
        return spent


def _by_name(given: tuple[Any, ...], ours: list[str], with_monitor: list[str]) -> dict[str, Any]:
    """Positional arguments by name: in our order or, if a string is first, in that of Keras and Lightning.

    Raises: TypeError for more than these.
    """
    names = with_monitor if given and isinstance(given[0], str) else ours
    if len(given) > len(names):
        raise TypeError(f"{len(given)} positional arguments, expected {', '.join(names)}: name the others")
    return dict(zip(names, given, strict=False))


class EMA(Callback):
    """Uses the exponential moving average of the parameters in evaluation, `predict` and `params`.

    After step t (the first is 0) the average becomes d * average + (1 - d) * parameters, with
    d = min(decay, (1 + t) / (10 + t)): the first steps are soon forgotten. It is part of the optimizer's
    state and of checkpoints; training continues with the parameters themselves, also in a second fit. With
    `cx.Term(every=n)` the steps are those in which the term's optimizer acts. Needs a strategy that keeps the
    optimizer's state whole (not zero1, local_sgd or diloco).
    """

    def __init__(self, decay: float = 0.999):
        self._decay = decay

    def around(self, optimizer: Optimizer) -> Optimizer:
        return with_parameter_average(optimizer, self._decay)

    def evaluated(self, state: TrainState) -> TrainState:
        return state._replace(params=averaged_params(state))


class BestCheckpoint(Callback):
    """Keeps at `path` a checkpoint of the evaluation with the best `monitor`, for `load_checkpoint(path)`.

    path: in an experiment, relative to its run folder. mode: see EarlyStopping. if_measured: accepts a run
    without validation data, which has no val_loss and keeps no checkpoint.
    """

    def __init__(
        self,
        path: str = "best_model.pt",
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        mode: str | None = None,
        *,
        if_measured: bool = False,
    ):
        self._path, self._due = str(path), False
        self._plateau = Plateau(1, monitor, min_delta, mode, wanted=not if_measured)

    def check(self, watchable: Watchable) -> None:
        self._plateau.watch(watchable)

    def begin(self, run: RunParts) -> None:
        self._save, self._due = run.save, False
        seen = curve(run.history, self._plateau.monitor.name)  # also what a rollback left behind
        if seen:  # a resumed run; a second fit of this object starts an empty history and keeps its best
            self._plateau.restart()
        for _, value in seen:
            self._plateau.improves(value)

    def on_epoch(self, info: EpochInfo) -> None:
        value = self._plateau.monitor.of(info)
        self._due = value is not None and self._plateau.improves(value)

    on_evaluation = on_epoch

    def wants_state(self, position: Position, saving: bool) -> bool:
        return self._due

    def on_state(self, moment: RunState) -> None:
        self._save(self._path, moment)
        self._due = False
