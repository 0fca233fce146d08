"""Saves on request: SIGUSR1 asks for a checkpoint and never ends the process."""

import atexit
import signal
import threading
from types import FrameType

# Signals that ask for a stop are one request within this time, whoever sends them to whichever processes of
# a job: a service manager signals every process at once, and the launcher passes its own signal on.
ONE_REQUEST_S = 2.0

_NUMBER = getattr(signal, "SIGUSR1", None)  # Windows has none
_asked = threading.Event()


def listen() -> None:
    """From now on SIGUSR1 is remembered, unless the program has a handler of its own. Twice is harmless."""
    if _NUMBER is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(_NUMBER) in (
        signal.SIG_DFL,
        signal.SIG_IGN,
    ):  # our launcher starts ranks with the latter
        signal.signal(_NUMBER, note)
        atexit.register(_ignore)  # the interpreter's shutdown would put the default back, which kills


def note(number: int = 0, frame: FrameType | None = None) -> None:
    """A checkpoint is wanted."""
    del number, frame
    _asked.set()


def take() -> bool:
    """Whether a checkpoint was asked for since the last call."""
    if not _asked.is_set():  # asked for in each step, where clearing costs a lock
        return False
    _asked.clear()
    return True


def _ignore() -> None:
    assert _NUMBER is not None
    signal.signal(_NUMBER, signal.SIG_IGN)
