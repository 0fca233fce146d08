"""Signals as values: what the operating system asked of this process, for hooks to read between steps."""

import os
import signal
import threading
from types import FrameType, TracebackType

from cyxjax.errors import EXIT_INTERRUPT
from cyxjax.launch import save_request

_STOPS = ("SIGTERM", "SIGINT", "SIGHUP")


class StopSignals:
    """While open, SIGTERM, SIGHUP and Ctrl-C ask for a polite stop and SIGUSR1 for a checkpoint.

    A second one does not wait: the previous handler is called. What this process was told to ignore when it
    began (nohup: SIGHUP; a shell's `&`: SIGINT) it goes on to ignore. Outside the main thread, where Python
    cannot catch signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    def stop(self) -> bool:
        """Whether a stop was asked for."""
        return self.received is not None

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        return save_request.take()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            there = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)]
            for number in there:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._caught)
            if hasattr(signal, "SIGUSR1"):
                self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, save_request.note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            return
        previous = self._previous.get(number)
        if number == signal.SIGINT and not callable(previous):
            previous = signal.default_int_handler
        if callable(previous):
            previous(number, frame)
        os._exit(EXIT_INTERRUPT if number == signal.SIGINT else 128 + number)
