"""The moments of a run as a hook sees them, and the values that the loop exchanges with hooks and feeds."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from cyxjax.core.step import Batch, TrainState

Sums = np.ndarray
"""float64 (Metrics.num_training_rows, 2): of a mean its weighted sum and weight, of a statistic numbers."""


class Position(NamedTuple):
    """How far a run is: optimizer steps done in all, and samples consumed of the epoch under way.

    The samples are its place in the data, at any batch size and world size; the steps of the epoch are
    counted for people.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    step_in_epoch: int = 0


class StepInfo(NamedTuple):
    """What hooks receive for one step, once its numbers have arrived."""

    position: Position  # after the step
    sums: Sums
    signals: tuple[float, float]  # how many replicas ask to stop, to save


class EpochInfo(NamedTuple):
    """What hooks receive for one epoch, or for an evaluation within one; equal on all ranks."""

    position: Position
    train: dict[str, Any]  # a number each, or an array (a confusion matrix)
    val: dict[str, Any]


class RunState(NamedTuple):
    """The run between two steps, whole: what a checkpoint holds."""

    position: Position
    state: TrainState
    sums: Sums  # of the epoch under way


class Hook:
    """Does nothing at each moment of a run; a hook overrides what it needs. `True` from one asks to stop.

    If one hook on one rank asks to stop, all ranks stop at the same step.
    """

    def on_start(self, moment: RunState) -> bool | None:
        """Before the first step: a run that was over when it was saved asks to stop."""

    def ask(self) -> tuple[float, bool]:
        """(stop, save): what this rank asks of all, sent along with the next step. A number: how strongly."""
        return False, False

    def on_step(self, info: StepInfo) -> bool | None:
        """The numbers of a step have arrived; later steps are already under way."""

    def saves_at(self, position: Position) -> bool:
        """Whether the run is saved after this step, whatever a rank asks. All ranks must say the same."""
        return False

    def wants_state(self, position: Position, saving: bool) -> bool:
        """Whether `on_state` should see the state after this step, where the run is saved if `saving`. All
        ranks must say the same.
        """
        return False

    def on_state(self, moment: RunState) -> TrainState | None:
        """The state after a step, all numbers up to it known. It is donated to the next step: copy it.

        A state given back takes its place, also for the hooks after this one; the same on all ranks.
        """
        return None

    def on_epoch(self, info: EpochInfo) -> bool | None:
        """An epoch and its evaluation are over."""

    def on_evaluation(self, info: EpochInfo) -> bool | None:
        """An evaluation within an epoch is over, of which `info.train` says nothing yet."""

    def next_state(self, info: EpochInfo, state: TrainState) -> TrainState:
        """The state to go on from after `on_epoch` and `on_evaluation`. The same on all ranks."""
        return state

    def on_end(self, moment: RunState, finished: bool) -> None:
        """The run is over: `finished`, or stopped before its time."""


class SavingHook(Hook):
    """Sees every state that is saved, and the last one."""

    def wants_state(self, position: Position, saving: bool) -> bool:
        return saving

    def on_end(self, moment: RunState, finished: bool) -> None:
        self.on_state(moment)


class Fed(NamedTuple):
    """One step's batch, and where in the data the run is after it."""

    batch: Batch
    samples: int  # of the epoch, consumed with it over all replicas
    is_last: bool = False  # of the epoch; False also where that is not known
    place: int | None = None  # of the step in `batch`, where that holds the batches of several steps


class Feed(NamedTuple):
    """Where batches come from: functions of the position, so that a resumed run asks for the same ones."""

    # (where to go on, ask, steps of a dispatch at most): with more than one, batches of as many steps
    train: Callable[[Position, Callable[[], tuple[float, bool]], int], Iterable[Fed]]
    steps_per_epoch: int | None  # of a whole one; None: known when the epoch ends
    val: Callable[[], Iterable[Batch]] | None
    close: Callable[[], None] = lambda: None  # what is held open from one epoch to the next


def overriding(hooks: list[Hook], *names: str) -> list[Hook]:
    """Those hooks that have something to do at a moment of `names`: a step is too short to ask the others."""
    own = lambda hook, name: getattr(type(hook), name) is not getattr(Hook, name)  # noqa: E731
    return [hook for hook in hooks if any(own(hook, name) for name in names)]


def stops(answer: Any) -> bool:
    """Whether what a hook returned asks to stop: `True` does, as a bool of Python, numpy or jax."""
    is_bool = isinstance(answer, bool) or getattr(answer, "dtype", None) == np.bool_
    return bool(is_bool and np.all(answer))
