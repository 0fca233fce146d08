"""The training loop, a function of values. Logging, saving and stopping are hooks.

batches -> step -> (state, sums) -> hooks, which read sums up to `in_flight` steps behind the device
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from cyxjax.core.step import Batch, TrainState
from cyxjax.core.trees import unchanged
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.stop_reasons import CALLBACK
from cyxjax.train.hooks.hook import EpochInfo, Fed, Feed, Hook, Position, RunState, overriding, stops
from cyxjax.train.program import Program
from cyxjax.train.settings import Evaluations

Follow = Callable[[Callable[[], RunState]], None]


class Wish:
    """Whether a hook of this rank asks to stop; a request made before a rollback stays.

    All ranks receive it with the next step, or by an exchange if there is none: a rank that stopped alone
    would leave the others waiting in the next step.
    any_rank: (what, mine) -> whether `mine` is true on one rank at least; all ranks call it.
    """

    def __init__(self, any_rank: Callable[[str, bool], bool]) -> None:
        self._any_rank, self.to_stop = any_rank, False

    def on_any_rank(self, name: str, position: Position, answers: list[bool | None]) -> bool:
        """Whether a hook of any rank asks to stop; `answers`: what those of this rank returned at `name`.

        The exchange also detects a rank that alone called a collective function, such as `evaluate`.
        """
        self.to_stop |= any(map(stops, answers))
        return self._any_rank(f"{name} of the callbacks, after step {position.step}", self.to_stop)


def fit(
    program: Program,
    feed: Feed,
    start: RunState,
    hooks: Iterable[Hook],
    *,
    epochs: int,
    in_flight: int,
    at_once: int,
    evaluations: Evaluations,
    max_steps: int | None,
    evaluated: bool,
    follow: Follow,
    wish: Wish,
    skipped: Callable[[], int],
) -> RunState:
    """Trains from `start` until `epochs` or `max_steps` are done or a hook of any rank stops it; returns the
    final state of the run.

    at_once: most steps per dispatch; hooks that act on the state or ask to stop take effect at its end.
    evaluated: whether an evaluation due after the step of `start` was made; if not, it is made first.
    follow: called with functions that return the current state, for hooks and after errors: a step deletes
        the state before it.
    skipped: number of steps that the run has left out.
    """
    hooks = list(hooks)
    evaluations = evaluations if feed.val is not None else Evaluations(0, 0)
    moment = start
    stop = wish.on_any_rank("on_start", start.position, [hook.on_start(start) for hook in hooks])
    stop |= max_steps is not None and start.position.step >= max_steps  # the run had already ended
    look = program.check.watch()
    to_evaluate = not evaluated and evaluations.after(start.position.step)
    compiled: set[Any] = set()  # shapes of the batches so far: each has a program of its own
    while moment.position.epoch < epochs and not stop:
        first = moment.position
        moment, last, to_evaluate, stop, save = _epoch(
            program,
            feed,
            moment,
            hooks,
            in_flight,
            at_once,
            evaluations,
            to_evaluate,
            max_steps,
            follow,
            look,
            wish,
            compiled,
        )
        # A stop at the very last step ends the epoch as usual, so that its evaluation is not lost.
        if stop and not last:
            break
        position = Position(moment.position.step, moment.position.epoch + 1, place=moment.position.place)
        to_evaluate |= evaluations.at_end_of(position.epoch, epochs)
        val = _evaluated(program, feed, moment) if to_evaluate else {}
        to_evaluate = False
        info = EpochInfo(position, program.training_means(first, moment, skipped()), val)
        moment = RunState(position, moment.state, np.zeros_like(moment.sums))
        follow(partial(unchanged, moment))
        report_progress(position.step, "eval")  # callbacks may draw, print samples, upload
        moment, enough = _tell("on_epoch", hooks, info, moment, follow, wish)
        stop |= enough
        moment = _show_state(hooks, moment, save)  # also if a save was requested during the last steps
        follow(partial(unchanged, moment))
    report_progress(moment.position.step, "checkpoint")
    for hook in hooks:
        hook.on_end(moment, moment.position.epoch >= epochs)
    report_progress(moment.position.step, "idle")
    return moment


def _epoch(
    program: Program,
    feed: Feed,
    moment: RunState,
    hooks: list[Hook],
    in_flight: int,
    at_once: int,
    evaluations: Evaluations,
    to_evaluate: bool,
    max_steps: int | None,
    follow: Follow,
    look: Callable[[np.ndarray], None],
    wish: Wish,
    compiled: set[Any],
) -> tuple[RunState, bool, bool, bool, bool]:
    """Trains the rest of the epoch. Returns (moment, last step reached, evaluation due, to stop, to save)."""
    position, state, sums = moment
    waiting: deque[tuple[Position, jax.Array, Any]] = deque()
    stop = save = last = False
    half = max(in_flight // 2, at_once)

    def settle(room: int) -> None:
        """Waits until at most `room` steps are running, and passes the numbers of finished ones to hooks."""
        nonlocal sums, stop, save
        while len(waiting) > room:
            info = program.read_sums(*waiting.popleft())
            look(info.compared)
            sums = sums + info.sums
            stop |= info.signals[0] > 0
            for hook in watching:  # a step is short: no generator, no list
                wish.to_stop |= stops(hook.on_step(info))
            save |= info.signals[1] > 0

    def now() -> RunState:
        """The run after the last dispatched step, including numbers that no hook has seen yet."""
        return RunState(position, state, sum((program.read_sums(*step).sums for step in waiting), sums))

    def pause() -> None:
        """Between two steps: makes the evaluation that is due, and passes the state to hooks that want it."""
        nonlocal state, to_evaluate, stop, save
        if to_evaluate:
            settle(0)
            info = EpochInfo(position, {}, _evaluated(program, feed, now()))
            moment, enough = _tell("on_evaluation", hooks, info, now(), follow, wish)
            state, to_evaluate, stop = moment.state, False, stop | enough
            follow(now)
        if _wanting(acting, position, save):
            settle(0)
            state = _show_state(hooks, now(), save).state
            save = False

    follow(now)
    watching, asking, acting = (
        overriding(hooks, *names) for names in (["on_step"], ["ask"], ["wants_state", "saves_at"])
    )
    ask = lambda: _asked(asking, wish.to_stop)  # noqa: E731
    report_progress(position.step, "data")
    due = lambda at: (  # noqa: E731
        evaluations.after(at.step) or at.step == max_steps or bool(_wanting(acting, at, False))
    )
    for some, ends in _dispatches(feed.train(position, ask, at_once), position, at_once, due):
        if to_evaluate:  # only before the first step
            pause()
        if stop:
            break
        batch, first = some[0][1].batch, some[0][1].at
        shapes = (first is None, *[leaf.shape for leaf in jax.tree.leaves(batch)])
        is_new = shapes not in compiled
        # For the supervisor's watchdog, which has a limit for each phase, and for a run's time by cause.
        report_progress(position.step, "compile" if is_new else "step")
        compiled.add(shapes)
        if first is None:
            state, handle = program.train_step(state, batch)
            waiting.append((some[0][0], handle, ...))
        else:
            state, handle = program.train_steps(state, batch, first, first + len(some))
            waiting.extend((when, handle, first + i) for i, (when, _) in enumerate(some))
        if is_new:
            report_progress(position.step, "step")  # it is compiled, and runs
        position, last = some[-1][0], ends
        to_evaluate = evaluations.after(position.step)
        if len(waiting) >= max(in_flight, 2 * at_once):
            settle(half)  # half at a time: the host waits rarely, the device never
        if not last:
            pause()
        stop |= position.step == max_steps
        if stop:
            break
        report_progress(position.step, "data")
    report_progress(position.step, "step")
    settle(0)
    return RunState(position, state, sums), last, to_evaluate, stop, save


def _dispatches(
    feed: Iterable[Fed], position: Position, at_once: int, due: Callable[[Position], bool]
) -> Iterator[tuple[list[tuple[Position, Fed]], bool]]:
    """Yields (steps of one dispatch, each with the position after it; whether the last is the epoch's last).

    A dispatch has steps whose batches were fed together, and ends at a step that is `due`.
    """
    some: list[tuple[Position, Fed]] = []
    for fed in feed:
        if some and fed.batch is not some[0][1].batch:
            yield some, False
            some = []
        done = position.step_in_epoch + 1
        position = Position(position.step + 1, position.epoch, fed.samples, done, fed.place)
        some.append((position, fed))
        if fed.at in (None, at_once - 1) or fed.is_last or due(position):
            yield some, fed.is_last
            some = []


def _tell(
    name: str, hooks: list[Hook], info: EpochInfo, moment: RunState, follow: Follow, wish: Wish
) -> tuple[RunState, bool]:
    """Calls `on_epoch` or `on_evaluation`, as `name` says: (the moment to continue from, whether to stop).

    The state that a hook returns is the current one for the hooks after it, which may save it.
    """
    answers = []
    for hook in hooks:
        answers.append(getattr(hook, name)(info))
        moment = moment._replace(state=hook.next_state(info, moment.state))
        follow(partial(unchanged, moment))
    return moment, wish.on_any_rank(name, info.position, answers)


def _wanting(hooks: list[Hook], position: Position, save: bool) -> list[Hook]:
    """The hooks that want to see the state after this step. save: whether a rank asked for a save."""
    saving = save or any([hook.saves_at(position) for hook in hooks])
    return [hook for hook in hooks if hook.wants_state(position, saving)]


def _show_state(hooks: list[Hook], moment: RunState, save: bool) -> RunState:
    """Passes the state to the hooks that want it; returns the moment with the state that they return."""
    for hook in _wanting(hooks, moment.position, save):
        report_progress(moment.position.step, "checkpoint")
        moment = moment._replace(state=hook.on_state(moment) or moment.state)
    return moment


def _asked(hooks: list[Hook], to_stop: bool) -> tuple[float, bool]:
    strongest, save = CALLBACK.sent * to_stop, False
    for hook in hooks:
        stop, wants = hook.ask()
        # The strongest request to stop: its strength encodes the reason, see StopHook.
        strongest = max(strongest, CALLBACK.sent if stops(stop) else stop)
        save = save or wants
    return strongest, save


def _evaluated(program: Program, feed: Feed, moment: RunState) -> dict[str, Any]:
    assert feed.val is not None
    report_progress(moment.position.step, "eval")
    return evaluate(program, moment.state, feed.val())


def evaluate(program: Program, state: TrainState, batches: Iterable[Batch]) -> dict[str, Any]:
    """Means of the metrics over `batches`; the same on all ranks."""
    count, look = program.metrics.num_rows, program.check.watch()
    sums = np.zeros((count, 2))
    waiting: deque[jax.Array] = deque()
    seen = program.consensus(state)

    def settle(room: int) -> None:
        while len(waiting) > room:
            rows = np.asarray(waiting.popleft(), np.float64)
            look(rows[count:])
            np.add(sums, rows[:count], out=sums)

    for batch in batches:
        waiting.append(program.eval_step(seen, batch))
        settle(1)
    settle(0)
    return program.metrics.over_all(sums, "the data evaluated on")
