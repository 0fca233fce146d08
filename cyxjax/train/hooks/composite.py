"""The callbacks of a trainer as one hook: if one callback on one rank asks to stop, all ranks stop.

A rank that stopped alone would leave the others waiting in the next step.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cyxjax.core.step import TrainState
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.stop_reasons import CALLBACK
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState, StepInfo, overriding, stops
from cyxjax.train.hooks.saving import HandOutHook

AnyRank = Callable[[str, bool], bool]
"""(what, mine) -> whether it is true on one rank at least; all ranks call it."""
_SPEAK = ("on_start", "ask", "on_step", "on_epoch", "on_evaluation", "on_end")


def hooks_of(
    callbacks: Iterable[Hook],
    history: DistributedTrainingHistory,
    group: ProcessGroup,
    hand_out: Callable[[], None] | None,
) -> list[Hook]:
    """The hooks that a run calls for `callbacks`. Callbacks of cyxjax alone stay as they are: they decide by
    numbers that are equal on all ranks, and need no exchange.

    hand_out: gives a model that holds values the present ones: a copy, once an epoch.
    """
    found = list(callbacks)
    others = [one for one in found if not type(one).__module__.startswith("cyxjax.")]
    if not any(overriding(others, name) for name in _SPEAK):
        hooks = found
    else:
        hooks = [CompositeCallback(found, history, partial(on_any_rank, group))]
    return [HandOutHook(hand_out), *hooks] if others and hand_out else hooks


class CompositeCallback(Hook):
    """Hooks of which one on one rank can stop the run on all, at one step.

    A stop that is asked for at a step is sent with the next step, as a signal's is: no exchange of its own.
    At epochs and evaluations, and at both ends of a run, the ranks exchange it. There it also shows
    if one rank alone called something of all, such as `evaluate`.
    """

    def __init__(self, hooks: list[Hook], history: DistributedTrainingHistory, any_rank: AnyRank) -> None:
        self._hooks, self._history, self._any_rank = hooks, history, any_rank
        self._at_steps, self._asking, self._wanting = (
            overriding(hooks, name) for name in ("on_step", "ask", "wants_state")
        )
        self._wants_stop = False  # at a step, of this rank
        self._due: list[Hook] = []  # who wants to see the state

    def on_start(self, moment: RunState) -> bool:
        return self._call("on_start", moment)

    def ask(self) -> tuple[float, bool]:
        stop, save = self._wants_stop, False
        for hook in self._asking:
            wish, wants = hook.ask()
            stop, save = stop or bool(wish), save or wants
        return CALLBACK.sent * stop, save

    def on_step(self, info: StepInfo) -> None:
        for hook in self._at_steps:
            self._wants_stop |= stops(hook.on_step(info))

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        self._due = [hook for hook in self._wanting if hook.wants_state(position, asked_to_save)]
        return bool(self._due)

    def on_state(self, moment: RunState) -> TrainState:
        for hook in self._due:
            moment = moment._replace(state=hook.on_state(moment) or moment.state)
        return moment.state

    def on_epoch(self, info: EpochInfo) -> bool:
        return self._call("on_epoch", info)

    def on_evaluation(self, info: EpochInfo) -> bool:
        return self._call("on_evaluation", info)

    def next_state(self, info: EpochInfo, state: TrainState) -> TrainState:
        for hook in self._hooks:
            state = hook.next_state(info, state)
        return state

    def on_end(self, moment: RunState, finished: bool) -> None:
        for hook in self._hooks:
            hook.on_end(moment, finished)
        self._any_rank(_place("on_end", moment), False)

    def _call(self, name: str, value: Any) -> bool:
        answers = [stops(getattr(hook, name)(value)) for hook in self._hooks]  # all are called
        stop = self._any_rank(_place(name, value), self._wants_stop or any(answers))
        if stop and not self._history.stopped_by:
            self._history.stopped_by = CALLBACK.name
        return stop


def _place(name: str, value: RunState | EpochInfo) -> str:
    return f"{name} of the callbacks, after step {value.position.step}"
