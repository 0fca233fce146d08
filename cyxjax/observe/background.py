"""Runs a sink in a thread with a bounded queue, so that a slow sink does not delay training."""

import queue
import threading
import time
from collections.abc import Callable

from cyxjax.observe.records import Record, Sink, Warn, copied, describe

_STOP = object()
_LOOK_S = 0.05  # between two looks at a sink that is being closed


class BackgroundSink:
    """Opens and feeds `open_sink()`'s sink in a thread of its own; `log` never waits and never raises.

    At most `depth` records wait; more are dropped, with one warning. An error ends the sink, with one
    warning. `close` waits at most `close_s` seconds, and not that long for a sink that has been busy with
    one record for `stuck_s`; the thread is a daemon, so a sink that is stuck does not keep the process.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        warn: Warn,
        *,
        depth: int = 1024,
        close_s: float = 30.0,
        stuck_s: float = 5.0,
    ) -> None:
        self._name, self._open, self._warn = name, open_sink, warn
        self._close_s, self._stuck_s = close_s, stuck_s
        self._busy_since: float | None = None  # when the record that is being written was taken
        self._queue: queue.Queue[object] = queue.Queue(depth)
        self._ended = threading.Event()  # the sink failed: drop what comes
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"cyxjax-sink-{name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        if self._ended.is_set():
            return
        try:
            self._queue.put_nowait(copied(record))  # a copy: the caller may go on using its dict
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                self._warn(f"WARNING: metrics sink {self._name} is too slow; some records are dropped")

    def close(self) -> None:
        end, asked = time.monotonic() + self._close_s, False
        while self._thread.is_alive():
            asked = asked or self._ask_to_stop()
            self._thread.join(_LOOK_S)
            if self._thread.is_alive() and (time.monotonic() > end or self._is_stuck()):
                lost = self._queue.qsize() - asked
                self._warn(
                    f"WARNING: metrics sink {self._name} did not finish in time and is abandoned with "
                    f"{lost} records unwritten"
                )
                return

    def _ask_to_stop(self) -> bool:
        """Whether there was room in the queue to say so."""
        try:
            self._queue.put_nowait(_STOP)
        except queue.Full:
            return False
        return True

    def _is_stuck(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._stuck_s

    def _run(self) -> None:
        try:
            sink = self._open()
            while (record := self._queue.get()) is not _STOP:
                self._busy_since = time.monotonic()
                sink.log(record)  # type: ignore[arg-type]  # only dicts and _STOP are put
                self._busy_since = None
            sink.close()
        except Exception as err:  # whatever a sink raises, training goes on
            self._ended.set()
            self._drain()
            self._warn(f"WARNING: metrics sink {self._name} failed and is disabled: {describe(err)}")

    def _drain(self) -> None:
        """Empties the queue, so that `close` finds room at once."""
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return
