"""The console of a run: on rank 0 only, live on a terminal, plain lines elsewhere.

All consoles have the same methods, so the loop need not distinguish them.
"""

import math
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO, cast

from cyxjax.launch import heartbeat
from cyxjax.launch.output import live_line, relayed_columns
from cyxjax.observe.lines import RunLines, doing, fitted
from cyxjax.observe.records import Record

_EVERY_S = 10.0  # between two lines of progress in a log
_LIVE_EVERY_S = 0.5  # between two updates of the live line


class Console:
    """Prints what a run does; subclasses override the methods for what they show."""

    def note(self, text: str, style: str | None = None) -> None:
        """Prints one line. style: a style of rich, used if there is colour."""

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        """Training begins. total_steps, epochs: of the whole run; None if not known."""

    def end(self) -> None:
        """Training that began has ended, also by an error: only lines are printed, no live line."""

    def step(self, record: Record) -> None:
        """Progress inside an epoch, every `log_every_n_batches` steps."""

    def epoch(self, record: Record, best: str = "") -> None:
        """The end of an epoch. best: the monitored metric if no earlier epoch had a better value, or ""."""


class NullConsole(Console):
    """Prints nothing: other ranks, and `verbose = False`."""


class PlainConsole(Console):
    """Prints flushed lines without colour or control characters: for logs and pipes.

    Prints a line about steps at most every ten seconds, regardless of the number of records.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _PatientStream(stream if stream is not None else sys.stdout)
        self._due_s, self._lines = -math.inf, RunLines()

    def note(self, text: str, style: str | None = None) -> None:
        self._stream.write(text + "\n")

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        self._due_s, self._lines = -math.inf, RunLines(total_steps, epochs)

    def step(self, record: Record) -> None:
        now = time.monotonic()
        if now >= self._due_s:
            self._due_s = now + _EVERY_S
            self.note(self._lines.step_line(record, now))

    def epoch(self, record: Record, best: str = "") -> None:
        self.note(self._lines.epoch_line(record, best))


class RichConsole(Console):
    """For a terminal: a live line at the bottom, and lines about epochs and events above it, in colour.

    The line is drawn twice a second by a thread, from the newest record and the heartbeat; the loop never
    waits for it. Not rich's live display, which hides the cursor: it would stay hidden if the run is killed.
    """

    def __init__(self, stream: TextIO | None = None, columns: int | None = None) -> None:
        """columns: the width of the terminal on which a launcher shows what this process writes."""
        from rich.console import Console as Terminal

        self._stream = _PatientStream(stream if stream is not None else sys.stdout)
        self._relayed = columns is not None
        self._terminal = Terminal(
            file=cast(TextIO, self._stream),
            width=columns,
            force_terminal=self._relayed or None,
            highlight=False,
            emoji=False,
        )
        self._lines = RunLines()
        self._record: Record = {}
        self._left: list[str] = []
        self._lock = threading.RLock()  # held while writing
        self._drawn, self._ended = False, threading.Event()

    def note(self, text: str, style: str | None = None) -> None:
        with self._lock:
            self._clear()
            self._terminal.print(text, style=style, markup=False)

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        self._lines, self._record, self._left = RunLines(total_steps, epochs), {}, []
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="cyxjax-live", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(2 * _LIVE_EVERY_S)  # not longer: a terminal can be stopped (Ctrl-S)
        with self._lock:
            self._clear()

    def step(self, record: Record) -> None:
        self._left = self._lines.left(record, time.monotonic())
        self._record = record

    def epoch(self, record: Record, best: str = "") -> None:
        self.note(self._lines.epoch_line(record, best), style="bold green" if best else "bold")

    def live_text(self, width: int) -> str:
        """The current text of the live line, in at most `width` columns."""
        now = heartbeat.progress()
        for_s = time.monotonic() - now.at_s if now.at_s else 0.0
        phase = doing(now.phase, for_s, heartbeat.part_text())
        return fitted(self._lines.live(self._record, now.step, phase, self._left), width)

    def _run(self) -> None:
        while not self._ended.wait(_LIVE_EVERY_S):
            # A line that reached the edge would wrap, and could not be overwritten.
            text = self.live_text(self._terminal.width - 1)
            with self._lock:
                if text and not self._ended.is_set():
                    self._draw(text)

    def _clear(self) -> None:
        """Clears the live line before a permanent line. Called with the lock held."""
        if self._drawn:
            self._draw("")

    def _draw(self, text: str) -> None:
        self._stream.write(live_line(text, relayed=self._relayed))
        self._drawn = bool(text)


class _PatientStream:
    """A text stream whose reader may go away (closed pipe, lost terminal): the run goes on unread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with suppress(OSError, ValueError):  # ValueError: it was closed
            # a terminal that knows only ASCII shows "?" for the rest
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Nothing waits: `write` has flushed it."""


def build_console(is_master: bool, verbose: bool = True) -> Console:
    """The console for this rank: for a terminal (a launcher's too), a log or notebook, or none.

    A program's own sys.stdout, which also writes into a file, may have `write` and `flush` only.
    """
    if not (is_master and verbose) or sys.stdout is None:  # None: it was closed before Python began
        return NullConsole()
    columns = relayed_columns()
    is_live = columns is not None or (getattr(sys.stdout, "isatty", bool)() and not _is_dumb())
    return RichConsole(columns=columns) if is_live else PlainConsole()


def _is_dumb() -> bool:
    """Whether the terminal declares that it cannot move its cursor (TERM=dumb)."""
    from rich.console import Console as Terminal

    return Terminal(file=sys.stdout).is_dumb_terminal
