"""Signals as values: what the operating system asked of this process, for hooks to read between steps."""

import os
import signal
import threading
from types import FrameType, TracebackType

from cyxjax.errors import EXIT_INTERRUPT


class StopSignals:
    """While open, SIGTERM and Ctrl-C ask for a polite stop and SIGUSR1 for a checkpoint.

    A second SIGTERM or Ctrl-C does not wait: the previous handler is called. Outside the main thread, where
    Python cannot catch signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._save = False
        self._previous: dict[int, object] = {}

    def stop(self) -> bool:
        """Whether a stop was asked for."""
        return self.received is not None

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", None)):
                if number is not None:
                    self._previous[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGUSR1", None):
            self._save = True
            return
        if self.received is None:
            self.received = signal.Signals(number)
            return
        previous = self._previous.get(number)
        if number == signal.SIGINT and not callable(previous):
            previous = signal.default_int_handler  # a job in the background is born ignoring Ctrl-C
        if callable(previous):
            previous(number, frame)
        os._exit(EXIT_INTERRUPT if number == signal.SIGINT else 128 + number)
