"""`profile: "10:15"`: traces steps 10 to 14 of a run on every rank, and writes one summary page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cyxjax.files import describe
from cyxjax.launch import heartbeat
from cyxjax.observe.profile import Measured, Tracing, group_page
from cyxjax.observe.records import write_atomic
from cyxjax.train.hooks.hook import Hook, Position, RunState

Exchange = Callable[[Any], Sequence[Any]]
"""this rank's JSON value -> those of all ranks, by rank; all of them call it together"""


class ProfileHook(Hook):
    """Traces the steps from `first` to `stop` (not included) into `folder`, once.

    Begins and ends between two steps, when no other is under way. At its end all ranks come to `exchange`,
    one whose trace failed too; then `page`, on the rank that is given one, holds all of them. What goes wrong
    is printed once by `say`.
    """

    def __init__(
        self,
        first: int,
        stop: int,
        folder: Path,
        say: Callable[[str], None],
        exchange: Exchange = lambda mine: [mine],
        page: Path | None = None,
    ) -> None:
        self._first, self._stop, self._folder, self._say = first, stop, folder, say
        self._exchange, self._page = exchange, page
        self._tracing: Tracing | None = None
        self._began: int | None = None
        self._problem = ""
        self._done = False

    def on_start(self, moment: RunState) -> None:
        if self._began is None and self._first <= moment.position.step < self._stop:
            self._start(moment.position.step)

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        if self._began is None:
            return self._first <= position.step < self._stop
        return not self._done and position.step >= self._stop

    def on_state(self, moment: RunState) -> None:
        if self._began is None:
            self._start(moment.position.step)
        else:
            self._end(self._began, moment.position.step)

    def on_end(self, moment: RunState, finished: bool) -> None:
        if self._done:
            return
        if self._began is not None:
            self._end(self._began, moment.position.step)
        elif self._first >= moment.position.step:
            self._say(
                f"WARNING: profile: the run ended at step {moment.position.step}, before {self._first}."
            )

    def _start(self, step: int) -> None:
        self._began = step
        try:
            self._tracing = Tracing(self._folder, heartbeat.spent())
        except Exception as err:  # a full disk, another trace of this process: training goes on
            self._fail(err)

    def _end(self, began: int, step: int) -> None:
        self._done = True
        tracing, self._tracing = self._tracing, None
        first_line, mine = "", {}
        try:
            if tracing is not None:
                lines, found = tracing.stop(step - began, heartbeat.spent())
                write_atomic(self._folder / "summary.txt", "\n".join(lines) + "\n")
                first_line, mine = lines[0], found._asdict()
        except Exception as err:
            self._fail(err)
        self._tell(f"steps {began} to {step - 1}", first_line, self._exchange(mine or self._problem))

    def _tell(self, which: str, first_line: str, ranks: Sequence[Any]) -> None:
        path = self._folder / "summary.txt"
        if self._page is not None:
            path = self._page
            lines = group_page([one if isinstance(one, str) else Measured(**one) for one in ranks])
            first_line = lines[0]
            try:
                write_atomic(path, "\n".join(lines) + "\n")
            except Exception as err:
                self._fail(err)
                return
            for rank, why in enumerate(ranks):
                if isinstance(why, str) and rank > 0:  # rank 0 has printed its own
                    self._say(f"WARNING: rank {rank}: no profile: {why}")
        if first_line:
            self._say(
                f"Profile of {which}: {first_line}. {path}; ui.perfetto.dev opens perfetto_trace.json.gz"
            )

    def _fail(self, err: Exception) -> None:
        self._problem = describe(err)
        self._say(
            f"WARNING: no profile: {self._problem}. HINT: free space in {self._folder}, or profile: null."
        )
