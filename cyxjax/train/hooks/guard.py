"""Looks now and then whether the run folder is still this job's: a folder can be deleted or given away."""

import time
from collections.abc import Callable

from cyxjax.train.loop import Hook, Position, RunState, StepInfo

_EVERY_S = 2.0


class FolderGuard(Hook):
    """Asks `still_ours` before each save and every two seconds; what it put right is said.

    Stands before the hooks that write. Ends the run with its error.
    """

    def __init__(
        self,
        still_ours: Callable[[], str],
        saving: Callable[[Position, bool], bool],
        say: Callable[[str], None],
    ):
        self._still_ours, self._saving, self._say, self._next_s = still_ours, saving, say, 0.0

    def on_step(self, info: StepInfo) -> None:
        if time.monotonic() >= self._next_s:
            self._look()

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        return self._saving(position, asked_to_save)

    def on_state(self, moment: RunState) -> None:
        self._look()

    def on_end(self, moment: RunState, finished: bool) -> None:
        self._look()

    def _look(self) -> None:
        if told := self._still_ours():
            self._say(told)
        self._next_s = time.monotonic() + _EVERY_S
