"""The training loop. Logging, saving and stopping are hooks.

batches -> step -> (state, sums) -> hooks, which read sums up to `in_flight` steps behind the device
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import jax
import numpy as np

from cyxjax.core.step import Batch, TrainState
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.stop_reasons import CALLBACK
from cyxjax.train.hooks.hook import EpochInfo, Fed, Feed, Hook, Position, RunState, overriding, stops
from cyxjax.train.program import Program
from cyxjax.train.settings import Course, Evaluations


class Loop:
    """Trains a run; its attributes are the run after the last dispatched step, also after an error.

    at_once: most steps per dispatch; hooks that act on the state or ask to stop take effect at its end.
    any_rank: (what, mine) -> whether `mine` is true on one rank at least; all ranks call it.
    follow: called with a function that returns the current state, for hooks and after errors: a step deletes
        the state before it.
    skipped: number of steps that the run has left out.
    """

    def __init__(
        self,
        program: Program,
        feed: Feed,
        hooks: list[Hook],
        course: Course,
        *,
        at_once: int,
        any_rank: Callable[[str, bool], bool],
        follow: Callable[[Callable[[], RunState]], None],
        skipped: Callable[[], int],
    ) -> None:
        self._program, self._feed, self._hooks, self._course = program, feed, hooks, course
        self._at_once, self._any_rank, self._follow, self._skipped = at_once, any_rank, follow, skipped
        self._evaluations = course.evaluations if feed.val is not None else Evaluations(0, 0)
        self._watching, self._asking, self._acting = (
            overriding(hooks, *names) for names in (["on_step"], ["ask"], ["wants_state", "saves_at"])
        )
        # All ranks receive it with the next step, or by an exchange if there is none: a rank that stopped
        # alone would leave the others waiting in the next step. A request made before a rollback stays.
        self._asks_to_stop = False  # whether a hook of this rank does
        self._compiled: set[Any] = set()  # shapes of the batches so far: each has a program of its own

    def run(self, start: RunState, *, evaluated: bool) -> RunState:
        """Trains from `start` until all epochs or `max_steps` are done or a hook of any rank stops it.
        Returns the final state of the run.

        evaluated: whether an evaluation due after the step of `start` was made; if not, it is made first.
        """
        self._position, self._state, self._sums = start
        self._waiting: deque[tuple[Position, jax.Array, Any]] = deque()  # steps whose numbers were not read
        self._look = self._program.check.watch()
        self._stop = self._to_save = False
        self._to_evaluate = not evaluated and self._evaluations.after(start.position.step)
        self._follow(self._now)
        self._stop_if_asked("on_start", [hook.on_start(start) for hook in self._hooks])
        most, epochs = self._course.max_steps, self._course.epochs
        self._stop |= most is not None and start.position.step >= most  # the run had already ended
        while self._position.epoch < epochs and not self._stop:
            first = self._position
            # A stop at the very last step ends the epoch as usual, so that its evaluation is not lost.
            if not self._train_epoch() and self._stop:
                break
            self._end_epoch(first)
        self._report("checkpoint")
        end = self._now()
        for hook in self._hooks:
            hook.on_end(end, end.position.epoch >= epochs)
        self._report("idle")
        return end

    def _now(self) -> RunState:
        """The run after the last dispatched step, including numbers that no hook has seen yet."""
        unseen = (self._program.read_sums(*step).sums for step in self._waiting)
        return RunState(self._position, self._state, sum(unseen, self._sums))

    def _train_epoch(self) -> bool:
        """Trains the rest of the epoch, or until a stop. Returns whether its last step was reached."""
        at_once, in_flight = self._at_once, self._course.in_flight
        most, half = max(in_flight, 2 * at_once), max(in_flight // 2, at_once)
        is_last = False
        self._report("data")
        feed = self._feed.train(self._position, self._asked, at_once)
        for some, is_last in _dispatches(feed, self._position, at_once, self._is_due):
            if self._to_evaluate:  # only before the first step
                self._pause()
                if self._stop:
                    return False
            self._dispatch(some)
            self._to_evaluate = self._evaluations.after(self._position.step)
            if len(self._waiting) >= most:
                self._settle(half)  # half at a time: the host waits rarely, the device never
            if not is_last:
                self._pause()
            self._stop |= self._position.step == self._course.max_steps
            if self._stop:
                break
            self._report("data")
        self._report("step")
        self._settle(0)
        return is_last

    def _dispatch(self, some: list[tuple[Position, Fed]]) -> None:
        batch, first = some[0][1].batch, some[0][1].at
        shapes = (first is None, *[leaf.shape for leaf in jax.tree.leaves(batch)])
        is_new = shapes not in self._compiled
        # For the supervisor's watchdog, which has a limit for each phase, and for a run's time by cause.
        self._report("compile" if is_new else "step")
        self._compiled.add(shapes)
        if first is None:
            self._state, handle = self._program.train_step(self._state, batch)
            self._waiting.append((some[0][0], handle, ...))
        else:
            self._state, handle = self._program.train_steps(self._state, batch, first, first + len(some))
            self._waiting.extend((when, handle, first + i) for i, (when, _) in enumerate(some))
        if is_new:
            self._report("step")  # it is compiled, and runs
        self._position = some[-1][0]

    def _settle(self, room: int) -> None:
        """Waits until at most `room` steps are running, and passes the numbers of finished ones to hooks."""
        while len(self._waiting) > room:
            info = self._program.read_sums(*self._waiting.popleft())
            self._look(info.compared)
            self._sums = self._sums + info.sums
            self._stop |= info.signals[0] > 0
            for hook in self._watching:  # a step is short: no generator, no list
                self._asks_to_stop |= stops(hook.on_step(info))
            self._to_save |= info.signals[1] > 0

    def _pause(self) -> None:
        """Between two steps: makes the evaluation that is due, and passes the state to hooks that want it."""
        if self._to_evaluate:
            self._settle(0)
            self._call("on_evaluation", EpochInfo(self._position, {}, self._evaluated()))
        if self._wanting(self._position):
            self._settle(0)
            self._show_state()

    def _end_epoch(self, first: Position) -> None:
        """Evaluates if that is due, and passes the epoch's numbers and the state to the hooks.

        first: the position from which the epoch was trained.
        """
        self._to_evaluate |= self._evaluations.at_end_of(first.epoch + 1, self._course.epochs)
        val = self._evaluated() if self._to_evaluate else {}
        train = self._program.training_means(first, self._now(), self._skipped())
        self._position = self._position.next_epoch()
        self._sums = np.zeros_like(self._sums)
        self._report("eval")  # callbacks may draw, print samples, upload
        self._call("on_epoch", EpochInfo(self._position, train, val))
        self._show_state()  # also if a save was requested during the last steps

    def _evaluated(self) -> dict[str, Any]:
        assert self._feed.val is not None
        self._to_evaluate = False
        self._report("eval")
        return evaluate(self._program, self._state, self._feed.val())

    def _call(self, name: str, info: EpochInfo) -> None:
        """Calls `on_epoch` or `on_evaluation`, as `name` says.

        The state that a hook returns is the current one for the hooks after it, which may save it.
        """
        answers = []
        for hook in self._hooks:
            answers.append(getattr(hook, name)(info))
            self._state = hook.next_state(info, self._state)
        self._stop_if_asked(name, answers)

    def _show_state(self) -> None:
        """Passes the state to the hooks that want it, and continues from what they return."""
        for hook in self._wanting(self._position):
            self._report("checkpoint")
            self._state = hook.on_state(self._now()) or self._state
        self._to_save = False

    def _wanting(self, position: Position) -> list[Hook]:
        """The hooks that want to see the state after the step at `position`, also if a rank asked to save."""
        saving = self._to_save or any([hook.saves_at(position) for hook in self._acting])
        return [hook for hook in self._acting if hook.wants_state(position, saving)]

    def _is_due(self, at: Position) -> bool:
        """Whether a dispatch has to end at this step."""
        return (
            self._evaluations.after(at.step) or at.step == self._course.max_steps or bool(self._wanting(at))
        )

    def _stop_if_asked(self, name: str, answers: list[bool | None]) -> None:
        """Stops if a hook of any rank asks to; `answers`: what those of this rank returned at `name`.

        The exchange also detects a rank that alone called a collective function, such as `evaluate`.
        """
        self._asks_to_stop |= any(map(stops, answers))
        what = f"{name} of the callbacks, after step {self._position.step}"
        self._stop |= self._any_rank(what, self._asks_to_stop)

    def _asked(self) -> tuple[float, bool]:
        """(stop, save): what the hooks of this rank ask for, sent with the next step."""
        strongest, save = CALLBACK.sent * self._asks_to_stop, False
        for hook in self._asking:
            stop, wants = hook.ask()
            # The strongest request to stop: its strength encodes the reason, see StopHook.
            strongest = max(strongest, CALLBACK.sent if stops(stop) else stop)
            save = save or wants
        return strongest, save

    def _report(self, phase: str) -> None:
        report_progress(self._position.step, phase)


def _dispatches(
    feed: Iterable[Fed], position: Position, at_once: int, is_due: Callable[[Position], bool]
) -> Iterator[tuple[list[tuple[Position, Fed]], bool]]:
    """Yields (steps of one dispatch, each with the position after it; whether the last is the epoch's last).

    A dispatch has steps whose batches were fed together, and ends at a step that is due.
    """
    some: list[tuple[Position, Fed]] = []
    for fed in feed:
        if some and fed.batch is not some[0][1].batch:
            yield some, False
            some = []
        position = position.after(fed.samples, fed.place)
        some.append((position, fed))
        if fed.at in (None, at_once - 1) or fed.is_last or is_due(position):
            yield some, fed.is_last
            some = []


def evaluate(program: Program, state: TrainState, batches: Iterable[Batch]) -> dict[str, Any]:
    """Means of the metrics over `batches`; the same on all ranks."""
    count, look = program.metrics.num_rows, program.check.watch()
    sums = np.zeros((count, 2))
    seen = program.consensus(state)
    handles = (program.eval_step(seen, batch) for batch in batches)
    for handle, _ in pairwise(chain(handles, [None])):  # numbers are read while the next step runs
        rows = np.asarray(handle, np.float64)
        look(rows[count:])
        sums += rows[:count]
    return program.metrics.over_all(sums, "the data evaluated on")
