"""Signals as values: between steps, hooks read which signals this process received."""

import atexit
import os
import signal
import threading
import time
from types import FrameType, TracebackType

from cyxjax.errors import EXIT_INTERRUPT
from cyxjax.launch import save_request
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.observe.stop_reasons import INTERRUPT, SIGNAL, StopReason, reason_of


def end_program_if_stopped(history: DistributedTrainingHistory, *, prints: bool) -> None:
    """Returns unless SIGTERM or SIGHUP ended the training; then raises SystemExit, with the exit code 143.

    prints: whether this process says at which step a signal or Ctrl-C stopped the training.
    """
    reason = reason_of(history.stopped_by)
    if reason in (SIGNAL, INTERRUPT) and prints:
        where = f"fit: stopped by {reason.note} at step {history.num_steps}."
        warn_on_stderr(f"{where} HINT: fit(..., resume='auto') or a run_dir continues from that step.")
    if reason is SIGNAL:
        # Not sys.exit, which ends a rank as failed, without waiting: all ranks stopped after the same step,
        # and some may need longer than others to end.
        raise SystemExit(reason.exit_code)


class StopSignals:
    """While open, SIGTERM, SIGHUP and Ctrl-C ask to stop after a save, and SIGUSR1 for a checkpoint.

    Signals within ONE_REQUEST_S of the first are the same request, also after the end of the context. A later
    one does not wait for the save: the previous handler is called. A signal that was ignored before (nohup:
    SIGHUP; a shell's `&`: SIGINT) stays ignored. Outside the main thread, where Python cannot catch signals,
    nothing is changed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_s = 0.0
        self._previous: dict[int, object] = {}
        self._is_open = False

    def reason(self) -> StopReason | None:
        """The reason to stop, once a signal asked for it."""
        if self.received is None:
            return None
        return INTERRUPT if self.received is signal.SIGINT else SIGNAL

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._is_open = True
            for number in save_request.STOPS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._caught)
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, save_request.note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if not self._repeats():
            self._restore()
        else:  # at the end of the process Python would set the default action, which ends it by the signal
            atexit.register(self._ignore)

    def _repeats(self) -> bool:
        """Whether a signal at this moment belongs to the request that was received."""
        return self.received is not None and time.monotonic() < self._received_s + save_request.ONE_REQUEST_S

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _ignore(self) -> None:
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._repeats():
            return
        if not self._is_open:
            self._restore()
            signal.raise_signal(number)
            return
        if self.received is None:
            self.received, self._received_s = signal.Signals(number), time.monotonic()
            return
        previous = self._previous.get(number)
        if number == signal.SIGINT and not callable(previous):
            previous = signal.default_int_handler
        if callable(previous):
            previous(number, frame)
        os._exit(EXIT_INTERRUPT if number == signal.SIGINT else 128 + number)
