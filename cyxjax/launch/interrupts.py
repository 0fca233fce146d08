"""Ctrl-C in code that must not be cut in two, or in which Python would lose it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_at_end(*, also_at_once: bool = False) -> Iterator[None]:
    """A block, or a decorated function, at whose end a Ctrl-C raises that came meanwhile; a second one raises
    at once. An update, which is given the buffers of the state, stores their successors before it raises.

    also_at_once: the first one raises at once too, and at the end only if that had no effect: Python drops
    what is raised in a callback of its garbage collector, and jax has one.
    """
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        is_second, is_pending = is_pending, True
        if is_second or also_at_once:
            usual(number, frame)
            is_pending = False  # it did not raise: a handler of the user's own

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else the usual handler has put another in its place
            signal.signal(signal.SIGINT, usual)
    if is_pending:
        signal.raise_signal(signal.SIGINT)
