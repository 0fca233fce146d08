"""All callbacks of a trainer together: what each adds to the step, and one hook that calls them.

If one callback on one rank asks to stop, all ranks stop: a rank that stopped alone would leave the others
waiting in the next step.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cyxjax.core.step import TrainState
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import ConfigError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.observe.stop_reasons import CALLBACK
from cyxjax.train.hooks.callbacks import EMA, Callback, Optimizer, RunParts
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState, StepInfo, overriding, stops
from cyxjax.train.hooks.progress import Rate
from cyxjax.train.hooks.saving import HandOutHook
from cyxjax.train.monitor import Watchable

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
    """Several hooks as one: if one of them asks to stop on one rank, all ranks stop at the same step.

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


# ---- at the start, and within the step -----------------------------------------------------------------


def around(hooks: Iterable[Hook], optimizer: Optimizer) -> Optimizer:
    """`optimizer` with the parts of all callbacks; averages outermost: they are of final updates."""
    found = _callbacks(hooks)
    for callback in sorted(found, key=lambda one: isinstance(one, EMA)):
        optimizer = callback.around(optimizer)
    return optimizer


def in_the_step(hooks: Iterable[Hook]) -> list[Callback]:
    """The callbacks that add a part to the optimizer and its state."""
    return [one for one in _callbacks(hooks) if type(one).around is not Callback.around]


def evaluated(hooks: Iterable[Hook], state: TrainState) -> TrainState:
    """What evaluation sees of a state all replicas agree on."""
    for callback in _callbacks(hooks):
        state = callback.evaluated(state)
    return state


def learning_rate(hooks: Iterable[Hook], rate: Rate) -> Rate:
    """`rate` (of optimizer steps done) times the callbacks' factors; None where it is not known."""
    found = _callbacks(hooks)

    def rate_then(step: int) -> float | None:
        base = rate(step)
        return None if base is None else base * math.prod(one.learning_rate_factor() for one in found)

    return rate_then


def begin(hooks: Iterable[Hook], run: RunParts) -> None:
    """Calls `begin` of all callbacks."""
    for callback in _callbacks(hooks):
        callback.begin(run)


def check_watched(hooks: Iterable[Hook], watchable: Watchable) -> None:
    """Raises: ConfigError for a callback that waits for what the run does not measure."""
    for callback in _callbacks(hooks):
        callback.check(watchable)


def checked(hooks: Iterable[Any]) -> list[Hook]:
    """`hooks` as a list. Raises: ConfigError for what is no hook."""
    found = list(hooks)
    for one in found:
        if not isinstance(one, Hook):
            given = one.__name__ if isinstance(one, type) else type(one).__name__
            raise ConfigError(
                f"callbacks hold {given}, expected objects of cyxjax.train.hooks.hook.Hook. "
                "HINT: callbacks=[EarlyStopping(patience=3)], with the object and not its class."
            )
        _warn_of_other_methods(one, Callback if isinstance(one, Callback) else Hook)
    return found


def _warn_of_other_methods(hook: Hook, known: type) -> None:
    """Prints a line for each on_... method of `hook` that cyxjax does not call. known: the class of hooks."""
    called = [name for name in dir(known) if name.startswith("on_")]
    for name in sorted(set(dir(hook)) - set(dir(known))):
        if name.startswith("on_") and callable(getattr(type(hook), name, None)):
            warn_on_stderr(
                f"the callback {type(hook).__name__} has a method {name}, which cyxjax does not call. "
                f"HINT: use one of {', '.join(called)}."
            )


def _callbacks(hooks: Iterable[Hook]) -> list[Callback]:
    return [one for one in hooks if isinstance(one, Callback)]
