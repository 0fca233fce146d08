"""`profile: "10:15"`: traces steps 10 to 14 of a run on every rank, and writes one summary per rank."""

import sys
from collections.abc import Callable
from pathlib import Path

from cyxjax.launch import heartbeat
from cyxjax.observe.profile import Tracing
from cyxjax.observe.records import write_atomic
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.redaction import describe
from cyxjax.train.hooks.hook import Hook, Position, RunState


class ProfileHook(Hook):
    """Traces the steps from `first` to `stop` (not included) into `folder`, once.

    Begins and ends between two steps, when no step is running. `say` prints the path of the profile on one
    rank; errors are printed on every rank.
    """

    def __init__(self, first: int, stop: int, folder: Path, say: Callable[[str], None]) -> None:
        self._first, self._stop, self._folder, self._say = first, stop, folder, say
        # Steps after which the trace begins or, once it has begun, ends; the same on all ranks.
        self._due = range(first, stop)
        self._began: int | None = None
        self._tracing: Tracing | None = None

    def on_start(self, moment: RunState) -> None:
        if self._began is None and moment.position.step in self._due:
            self._start(moment.position.step)

    def wants_state(self, position: Position, saving: bool) -> bool:
        return position.step in self._due

    def on_state(self, moment: RunState) -> None:
        if self._began is None:
            self._start(moment.position.step)
        else:
            self._end(self._began, moment.position.step)

    def on_end(self, moment: RunState, finished: bool) -> None:
        if self._began is not None:
            self._end(self._began, moment.position.step)
        elif self._first >= moment.position.step:
            self._say(
                f"WARNING: profile: the run ended at step {moment.position.step}, before step {self._first}."
            )

    def _start(self, step: int) -> None:
        self._began, self._due = step, range(self._stop, sys.maxsize)
        try:
            self._tracing = Tracing(self._folder, heartbeat.spent())
        except Exception as err:  # a full disk, another trace of this process: training continues
            self._fail(err)

    def _end(self, began: int, step: int) -> None:
        self._due = range(0)
        tracing, self._tracing = self._tracing, None
        if tracing is None:
            return
        path = self._folder / "summary.txt"
        try:
            lines = tracing.stop(step - began, heartbeat.spent())
            write_atomic(path, "\n".join(lines) + "\n")
        except Exception as err:
            self._fail(err)
            return
        self._say(
            f"Profile of steps {began} to {step - 1}: {lines[0]}. See {path}, or "
            "open perfetto_trace.json.gz in ui.perfetto.dev"
        )

    def _fail(self, err: Exception) -> None:
        warn_on_stderr(
            f"WARNING: no profile: {describe(err)}. HINT: free space in {self._folder}, or set profile: null."
        )
