"""Signals that are requests: SIGUSR1 asks for a checkpoint and never ends the process, STOPS for an end."""

import atexit
import signal
import threading
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals that ask for a stop are one request within this time, whoever sends them to whichever processes of
# a job: a service manager signals every process at once, and the launcher passes its own signal on.
ONE_REQUEST_S = 2.0

_asked = False  # no Event: a signal handler may interrupt itself, in its lock too


def listen() -> None:
    """Remembers SIGUSR1 from now on, unless the program has its own handler. A second call does no harm."""
    if threading.current_thread() is not threading.main_thread():
        return
    free = (signal.SIG_DFL, signal.SIG_IGN)  # our launcher starts ranks with the latter
    if signal.getsignal(signal.SIGUSR1) in free:
        signal.signal(signal.SIGUSR1, note)
        # the interpreter's shutdown would put the default back, which kills
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


def note(number: int = 0, frame: FrameType | None = None) -> None:
    """Notes that a checkpoint is wanted."""
    global _asked
    _asked = True


def take() -> bool:
    """Whether a checkpoint was asked for since the last call."""
    global _asked
    if not _asked:
        return False
    _asked = False
    return True
