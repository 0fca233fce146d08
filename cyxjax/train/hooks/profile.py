"""`profile: "10:15"`: a trace of steps 10 to 14 of a run, and one page of what it says."""

from collections.abc import Callable
from pathlib import Path

from cyxjax.launch import heartbeat
from cyxjax.observe.profile import Tracing
from cyxjax.observe.records import describe, write_atomic
from cyxjax.train.loop import Hook, Position, RunState


class ProfileHook(Hook):
    """Traces the steps from `first` to `stop` (not included) into `folder`, once.

    Begins and ends between two steps, when no other is under way. What goes wrong is told once by `say`.
    """

    def __init__(self, first: int, stop: int, folder: Path, say: Callable[[str], None]) -> None:
        self._first, self._stop, self._folder, self._say = first, stop, folder, say
        self._tracing: Tracing | None = None
        self._began = 0
        self._done = False

    def on_start(self, moment: RunState) -> None:
        if self._first <= moment.position.step < self._stop:
            self._start(moment.position.step)

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        if self._done:
            return False
        return position.step >= (self._first if self._tracing is None else self._stop)

    def on_state(self, moment: RunState) -> None:
        if not self.wants_state(moment.position, False):
            return
        if self._tracing is not None:
            self._end(moment.position.step)
        elif moment.position.step < self._stop:
            self._start(moment.position.step)

    def on_end(self, moment: RunState, finished: bool) -> None:
        if self._tracing is not None:
            self._end(moment.position.step)
        elif not self._done and self._first >= moment.position.step:
            self._say(
                f"WARNING: profile: the run ended at step {moment.position.step}, before {self._first}."
            )

    def _start(self, step: int) -> None:
        self._began = step
        try:
            self._tracing = Tracing(self._folder, heartbeat.spent())
        except Exception as err:  # a full disk, another trace of this process: training goes on
            self._fail(err)

    def _end(self, step: int) -> None:
        self._done = True
        tracing, self._tracing = self._tracing, None
        assert tracing is not None
        try:
            lines = tracing.stop(step - self._began, heartbeat.spent())
            write_atomic(self._folder / "summary.txt", "\n".join(lines) + "\n")
        except Exception as err:
            self._fail(err)
        else:
            text = f"Profile of steps {self._began} to {step - 1}: {lines[0]}. {self._folder / 'summary.txt'}"
            self._say(f"{text}; ui.perfetto.dev opens perfetto_trace.json.gz")

    def _fail(self, err: Exception) -> None:
        self._done = True
        self._say(
            f"WARNING: no profile: {describe(err)}. HINT: free space in {self._folder}, or profile: null."
        )
