"""The moments of a run as a hook sees them, and the values that the loop exchanges with hooks and feeds."""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from cyxjax.core.step import Batch, TrainState
from cyxjax.data.batches import HostBatch
from cyxjax.data.ledger import Span, StreamFacts, delivered

Sums = np.ndarray
"""float64 (Metrics.num_training_rows, 2): a mean's weighted sum and weight, or the numbers of a statistic."""
NOTHING_COMPARED = np.zeros((0, 2))
_AT_ONCE = 64  # steps summed together: 2 us per step, where one alone costs 15


class Position(NamedTuple):
    """How far a run is: optimizer steps done in total, and samples consumed in the current epoch and before.

    The samples say where it is in the data, at any batch size and world size; the steps of the epoch are
    counted for display. All but `place` is equal on all ranks.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    step_in_epoch: int = 0
    earlier: int = 0  # samples consumed in the epochs before
    place: Any = None  # of this rank's loader in its stream, as JSON; None: not known

    def numbers(self) -> dict[str, int]:
        """All but `place`, which a checkpoint holds for every rank."""
        return {name: value for name, value in self._asdict().items() if name != "place"}

    def after(self, samples: int, place: Any = None) -> "Position":
        """The position after one more step of the epoch, which ends after `samples` of it."""
        done = self.step_in_epoch + 1
        return self._replace(step=self.step + 1, samples=samples, step_in_epoch=done, place=place)

    def next_epoch(self) -> "Position":
        """The beginning of the next epoch."""
        earlier = self.earlier + self.samples
        return Position(self.step, self.epoch + 1, earlier=earlier, place=self.place)

    def samples_since(self, before: "Position") -> int:
        """Samples trained since `before`, a position of the same epoch or of its beginning."""
        return self.samples - (before.samples if before.epoch == self.epoch else 0)


class StepInfo(NamedTuple):
    """What hooks receive for one step, once its numbers have arrived."""

    position: Position  # after the step
    sums: Sums
    signals: tuple[float, float]  # requests to stop and to save, summed over replicas; 0: none
    left_out: bool = False  # its gradients were not finite, so it changed nothing; its sums are 0 or finite
    compared: np.ndarray = NOTHING_COMPARED  # float64 (number of checks, 2), see `SplitCheck`


class EpochInfo(NamedTuple):
    """What hooks receive for one epoch, or for an evaluation within one; equal on all ranks, but for the
    place in `position`.
    """

    position: Position
    train: dict[str, Any]  # numbers, or arrays (a confusion matrix)
    val: dict[str, Any]


class RunState(NamedTuple):
    """The complete run between two steps: what a checkpoint holds."""

    position: Position
    state: TrainState
    sums: Sums  # of the current epoch


class Hook:
    """Base class of hooks. Its methods do nothing; a hook overrides those it needs. `True` asks to stop.

    If one hook on one rank asks to stop, all ranks stop at the same step.
    """

    def on_start(self, moment: RunState) -> bool | None:
        """Called before the first step; asks to stop if the run was already over when it was saved."""

    def ask(self) -> tuple[float, bool]:
        """(stop, save): what this rank asks for, sent with the next step. stop: a number, how strongly."""
        return False, False

    def on_step(self, info: StepInfo) -> bool | None:
        """Called when the numbers of a step have arrived; later steps are already running."""

    def saves_at(self, position: Position) -> bool:
        """Whether the run is saved after this step, whatever a rank asks. All ranks must return the same."""
        return False

    def wants_state(self, position: Position, saving: bool) -> bool:
        """Whether `on_state` should see the state after this step, where the run is saved if `saving`. All
        ranks must return the same.
        """
        return False

    def on_state(self, moment: RunState) -> TrainState | None:
        """Called with the state after a step, when all its numbers are known. Copy what you keep: the next
        step deletes it.

        A returned state replaces it, also for the hooks after this one; it must be the same on all ranks.
        """

    def on_epoch(self, info: EpochInfo) -> bool | None:
        """Called after an epoch and its evaluation."""

    def on_evaluation(self, info: EpochInfo) -> bool | None:
        """Called after an evaluation within an epoch; `info.train` is still empty."""

    def next_state(self, info: EpochInfo, state: TrainState) -> TrainState:
        """Returns the state to continue from. Called right after this hook's own `on_epoch` or
        `on_evaluation`; the same on all ranks.

        Callbacks that override it are called before all others, so that a checkpoint which another callback
        saves holds the new state.
        """
        return state

    def state_dict(self) -> Any:
        """What a checkpoint keeps of this hook, as rank 0 has it; None: nothing.

        JSON values, tuples, bytes and NumPy arrays. Called whenever the run is saved.
        """

    def load_state_dict(self, state: Any) -> None:
        """Takes, on all ranks, what `state_dict` returned for the checkpoint that the run continues from.
        Called before `on_start`: of a resumed fit, and after a rollback.
        """

    def on_end(self, moment: RunState, finished: bool) -> None:
        """Called at the end of the run: `finished`, or stopped early."""


class SavingHook(Hook):
    """Sees every state that is saved, and the last one; if `every` is not 0, also one in `every` steps."""

    every = 0

    def wants_state(self, position: Position, saving: bool) -> bool:
        return saving or bool(self.every and position.step % self.every == 0)

    def on_end(self, moment: RunState, finished: bool) -> None:
        self.on_state(moment)


class Fed(NamedTuple):
    """One step's batch, and where in the data the run is after it."""

    batch: Batch
    samples: int  # of the epoch, consumed up to and including it, over all replicas
    is_last: bool = False  # of the epoch; the feed ends with it
    at: int | None = None  # which step of `batch` it is, if that holds the batches of several steps
    place: Any = None  # of this rank's loader, see `Position`


class Tape:
    """The steps delivered to this process that are not part of a span yet."""

    def __init__(self, facts: StreamFacts | None = None) -> None:
        self.facts = facts  # None: a source without ids, of which nothing is noted
        self._fresh: list[tuple[int, int, int, Any, Any]] = []
        self._summed: list[Span] = []  # one per step, with this rank's share of the samples

    def note(self, epoch: int, host: HostBatch) -> None:
        """Notes one more delivered step."""
        # Inputs and targets are released: only the numbers of the samples are kept.
        self._fresh.append((epoch, host.stop - host.total, host.stop, host.ids, host.weight))
        if len(self._fresh) >= _AT_ONCE:
            self._sum()

    def take(self, place: tuple[int, int]) -> list[Span]:
        """Removes and returns the steps up to `place`, (epoch, samples), oldest first; later steps stay."""
        self._sum()
        due = [step for step in self._summed if (step.epoch, step.stop) <= place]
        self._summed = self._summed[len(due) :]
        return due

    def clear(self) -> None:
        """Forgets all steps."""
        self._fresh, self._summed = [], []

    def _sum(self) -> None:
        if self._fresh:
            epochs, firsts, stops, *rows = zip(*self._fresh, strict=True)
            ids, weight = map(np.stack, rows)
            self._summed += map(Span, epochs, firsts, stops, repeat(1), delivered(ids, weight > 0))
            self._fresh = []


class Feed(NamedTuple):
    """Where batches come from: functions of the position, so that a resumed run asks for the same batches."""

    # (position to continue from, ask, most steps per dispatch): if above 1, a batch holds that many steps
    train: Callable[[Position, Callable[[], tuple[float, bool]], int], Iterable[Fed]]
    steps_per_epoch: int | None  # of a whole epoch; None: not known before it ends
    val: Callable[[], Iterable[Batch]] | None
    close: Callable[[], None] = lambda: None  # closes what stays open between epochs
    tape: Tape = Tape()  # the steps that were given and are not recorded yet; of a loader, none


def overriding(hooks: Iterable[Hook], *names: str) -> list[Hook]:
    """The hooks that override a method of `names`: a step is too short to call the others."""
    own = lambda hook, name: getattr(type(hook), name) is not getattr(Hook, name)  # noqa: E731
    return [hook for hook in hooks if any(own(hook, name) for name in names)]


def stops(answer: Any) -> bool:
    """Whether what a hook returned asks to stop: `True` does, as a bool of Python, numpy or jax."""
    is_bool = isinstance(answer, bool) or getattr(answer, "dtype", None) == np.bool_
    return bool(is_bool and np.all(answer))
