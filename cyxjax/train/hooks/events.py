"""Writes a run's starts, saves, rollbacks and end to the event log."""

from collections.abc import Callable
from typing import Any

from cyxjax.observe.events import Events
from cyxjax.train.hooks.hook import Hook, Position, RunState


class EventsHook(Hook):
    """On every rank, which all make the same states; the log of one rank keeps the events.

    facts: what a start says besides its place. Stands after the hook that saves.
    """

    def __init__(
        self,
        events: Events,
        facts: Callable[[], dict[str, Any]],
        saving: Callable[[Position, bool], bool],
    ):
        self._events, self._facts, self._saving = events, facts, saving

    def on_start(self, moment: RunState) -> None:
        if self._events.begun:
            self._events.log("rollback", **_place(moment))
        else:
            self._events.log("start", **_place(moment), **self._facts())

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        return self._saving(position, asked_to_save)

    def on_state(self, moment: RunState) -> None:
        self._events.log("save", **_place(moment))

    def on_end(self, moment: RunState, finished: bool) -> None:
        self._events.log("end", **_place(moment), finished=finished)


def _place(moment: RunState) -> dict[str, int]:
    return {"step": moment.position.step, "epoch": moment.position.epoch}
