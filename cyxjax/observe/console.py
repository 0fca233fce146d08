"""The console of a run: on rank 0 only, live on a terminal, plain lines elsewhere.

All consoles have the same methods, so the loop never asks which one it has.
"""

import sys
import threading
import time
from contextlib import suppress
from typing import Any, Protocol, TextIO, cast

from cyxjax.launch.output import relayed_columns
from cyxjax.observe.lines import Columns, wrapped
from cyxjax.observe.live import LiveLine, Pace
from cyxjax.observe.records import Record, step_of

_EVERY_S = 10.0  # between two lines of progress in a log
_NOTEBOOK_EVERY_S = 0.5  # between two updates of the line of progress


class Console(Protocol):
    """Prints what a run does."""

    def note(self, text: str, style: str | None = None) -> None:
        """One line of news. style: of rich, where there is colour."""

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        """Training begins; it ends after so many steps and epochs of the whole run, None where not known."""

    def end(self) -> None:
        """Training is over, or was ended by an error: nothing is drawn any more but lines."""

    def step(self, record: Record) -> None:
        """Progress inside an epoch, every `log_every_n_batches` steps."""

    def epoch(self, record: Record, is_best: bool = False) -> None:
        """The end of an epoch. is_best: of what the run monitors, no earlier epoch had a better value."""


class NullConsole:
    """Prints nothing: other ranks, and `verbose = False`."""

    def note(self, text: str, style: str | None = None) -> None: ...
    def begin(self, total_steps: int | None, epochs: int | None = None) -> None: ...
    def end(self) -> None: ...
    def step(self, record: Record) -> None: ...
    def epoch(self, record: Record, is_best: bool = False) -> None: ...


class PlainConsole:
    """One line for each thing, flushed, without colour or control characters: for logs and pipes.

    Steps make a line at most every `every_s` seconds, however many records there are.
    """

    def __init__(self, stream: TextIO | None = None, *, every_s: float = _EVERY_S) -> None:
        self._stream = _PatientStream(stream if stream is not None else sys.stdout)
        self._every_s, self._pace, self._columns = every_s, Pace(), Columns()
        self._shown_s: float | None = None  # when a step last made a line

    def note(self, text: str, style: str | None = None) -> None:
        self._write(text)

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        self._pace, self._columns, self._shown_s = Pace(total_steps), Columns(epochs), None

    def end(self) -> None:
        return

    def step(self, record: Record) -> None:
        text = self.due_step_line(record, time.monotonic())
        if text is not None:
            self._write(text)

    def due_step_line(self, record: Record, now: float) -> str | None:
        """The line of progress; None where the one before was shown less than `every_s` seconds ago."""
        left_s = self._pace.left_s(step_of(record), now)
        if self._shown_s is not None and now - self._shown_s < self._every_s:
            return None
        self._shown_s = now
        return self._columns.step_line(record, self._pace.total_steps, left_s)

    def epoch(self, record: Record, is_best: bool = False) -> None:
        self._write(self._columns.epoch_line(record, is_best))

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class NotebookConsole(PlainConsole):
    """Lines as in a log, but for progress within an epoch: its line is replaced, and is gone at the end."""

    def __init__(self) -> None:
        super().__init__(every_s=_NOTEBOOK_EVERY_S)
        self._handle: Any = None

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        from IPython.display import display

        super().begin(total_steps, epochs)
        self._handle = display({"text/plain": "starting"}, raw=True, display_id=True)

    def end(self) -> None:
        self._show("")

    def step(self, record: Record) -> None:
        text = self.due_step_line(record, time.monotonic())
        if text is not None:
            self._show(text)

    def _show(self, text: str) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)


class RichConsole:
    """For a terminal: a live line at the foot, epochs and news above it, in colour.

    No live display of rich's: its thread hides the cursor, and a run that is killed would leave it hidden.
    """

    def __init__(self, stream: TextIO | None = None, columns: int | None = None) -> None:
        """columns: the width of the terminal on which a launcher shows what this process writes."""
        from rich.console import Console as Terminal

        target, relayed = stream if stream is not None else sys.stdout, columns is not None
        self._stream = _PatientStream(target)
        self._terminal = Terminal(
            file=cast(TextIO, self._stream), highlight=False, soft_wrap=True, force_terminal=relayed or None
        )
        self._lock = threading.RLock()
        self._live = LiveLine(self._write, self._lock, _fileno(target), columns)
        self._has_width = _fileno(target) is not None
        self._columns = Columns()

    def note(self, text: str, style: str | None = None) -> None:
        self._print(text, style)

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        self._columns = Columns(epochs)
        self._live.start(total_steps, epochs)

    def end(self) -> None:
        self._live.stop()

    def step(self, record: Record) -> None:
        self._live.tell(record)

    def epoch(self, record: Record, is_best: bool = False) -> None:
        self._print(self._columns.epoch_line(record, is_best), style="bold green" if is_best else "bold")

    def _print(self, text: str, style: str | None = None) -> None:
        with self._lock:
            self._live.clear()
            width = self._live.width()
            shown = "\n".join(wrapped(line, width) if self._has_width else line for line in text.split("\n"))
            self._terminal.print(shown, style=style, markup=False)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _fileno(stream: TextIO) -> int | None:
    """The file behind a stream; None for one in memory."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class _PatientStream:
    """A text stream whose reader may go away (closed pipe, lost terminal): the run goes on unread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        # a terminal that knows only ASCII shows "?" for the rest
        shown = text.encode(self.encoding, "replace").decode(self.encoding)
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(shown)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream.isatty()
        return False


def build_console(is_master: bool, verbose: bool = True, stream: TextIO | None = None) -> Console:
    """The console for this rank: for a terminal (a launcher's too), a notebook, a log, or none."""
    if not (is_master and verbose):
        return NullConsole()
    if stream is None and type(sys.stdout).__module__.partition(".")[0] == "ipykernel":
        return NotebookConsole()
    target, columns = stream if stream is not None else sys.stdout, relayed_columns()
    if stream is None and columns is not None:
        return RichConsole(columns=columns)
    return RichConsole(stream) if target.isatty() and not _is_dumb(target) else PlainConsole(stream)


def _is_dumb(stream: TextIO) -> bool:
    """Whether a terminal says of itself that it cannot move its cursor (TERM=dumb)."""
    from rich.console import Console as Terminal

    return Terminal(file=stream).is_dumb_terminal
