"""The status line at the foot of a terminal, and the pace at which it is drawn."""

import os
import threading
import time
from collections.abc import Callable
from typing import cast

from cyxjax.launch import heartbeat
from cyxjax.launch.output import CLEAR_TO_END, live_line
from cyxjax.observe.lines import LONG_S, doing, fitted, late, live_fields
from cyxjax.observe.records import Record, step_of

_EVERY_S = 0.5
_USUAL_WIDTH = 80


class Pace:
    """How far a run is on its way, and how long the rest takes at the speed since its first record."""

    def __init__(self, total_steps: int | None = None) -> None:
        self.total_steps = total_steps
        self._first: tuple[int, float] | None = None  # step, time: the program is compiled by then

    def left_s(self, step: int, now: float) -> float | None:
        """Seconds to go; None before there is a pace, and where the end is not known."""
        if self._first is None:
            self._first = (step, now)
        first, since = self._first
        if not self.total_steps or step <= first or step >= self.total_steps:
            return None
        return (now - since) / (step - first) * (self.total_steps - step)


class LiveLine:
    """Draws one line twice a second from a thread of its own, between `start` and `stop`.

    What it knows are the newest record and the heartbeat; the loop never waits for it. The cursor stays
    visible: a run that is killed leaves it so. write: puts text on the terminal. lock: of who writes there.
    columns: the width of the launcher's terminal, where the launcher draws the line; None: this process does.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        lock: threading.RLock,
        fileno: int | None,
        columns: int | None = None,
    ) -> None:
        self._write, self._lock, self._fileno, self._columns = write, lock, fileno, columns
        self._record: Record = {}
        self._pace, self._left_s = Pace(), cast(float | None, None)
        self._epochs: int | None = None
        self._drawn, self._stopped = False, threading.Event()
        self._before: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def start(self, total_steps: int | None, epochs: int | None = None) -> None:
        self._epochs = epochs
        self._pace, self._before = Pace(total_steps), heartbeat.spent()
        self._record, self._left_s = {}, None
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name="cyxjax-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes the line away; nothing is drawn afterwards."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(2 * _EVERY_S)  # not longer: a terminal can be stopped (Ctrl-S)
            self._thread = None
        with self._lock:
            if self._drawn and self._columns is not None:
                self._write(live_line("", relayed=True))
            self.clear()

    def tell(self, record: Record) -> None:
        """The newest numbers; the next drawing shows them."""
        self._left_s = self._pace.left_s(step_of(record), time.monotonic())
        self._record = record

    def clear(self) -> None:
        """Makes room for a line that stays. Called with the lock held."""
        if self._drawn and self._columns is None:  # a launcher clears the line that it has drawn
            self._write(f"\r{CLEAR_TO_END}")
            self._drawn = False

    def draw(self) -> None:
        text = self.text(
            self.width() - 1
        )  # a line that reached the edge would wrap, and could not be overwritten
        with self._lock:
            if text and not self._stopped.is_set():
                self._write(live_line(text, relayed=self._columns is not None))
                self._drawn = True

    def text(self, width: int) -> str:
        """What the line says now, in at most `width` columns."""
        now = heartbeat.progress()
        for_s = time.monotonic() - now.at_s if now.at_s else 0.0
        held_up = late(now, heartbeat.others()) if for_s > LONG_S else ""
        fields = live_fields(
            self._record,
            doing=doing(now.phase, now.step, for_s, heartbeat.part_text(), held_up),
            step=now.step,
            total_steps=self._pace.total_steps,
            left_s=self._left_s,
            waiting=self._waiting(),
            epochs=self._epochs,
        )
        return fitted(fields, width)

    def _waiting(self) -> float | None:
        """The share of training time spent waiting for data, since the start."""
        spent = heartbeat.spent()
        data_s, step_s = (spent.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in ("data", "step"))
        return data_s / (data_s + step_s) if step_s > 0 else None  # before the first step it would be all

    def width(self) -> int:
        """Asked each time: windows are resized. Of a launcher's terminal: as it was at the start."""
        if self._columns is not None:
            return self._columns
        try:
            return (
                os.get_terminal_size(self._fileno).columns or _USUAL_WIDTH
                if self._fileno is not None
                else _USUAL_WIDTH
            )
        except OSError:
            return _USUAL_WIDTH

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self.draw()
