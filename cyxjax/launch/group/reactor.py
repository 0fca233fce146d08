"""One thread that waits on many sockets and calls what belongs to each."""

import os
import selectors
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

TICK_S = 0.5

Log = Callable[[str], None]


class Reactor:
    """Calls `read` of a socket that has something to read, and `tick` after each round, twice a second.

    An error in one socket's call ends that socket's part (`failed`) and is logged in one line; the thread, on
    which everybody depends, goes on. at_end: the last thing the thread calls.
    """

    def __init__(self, name: str, tick: Callable[[], None], at_end: Callable[[], None], log: Log) -> None:
        self.closing = False
        self._tick, self._at_end, self._log = tick, at_end, log
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._logged: set[str] = set()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.add(self._wake_out, lambda: None, lambda: None)
        self.thread.start()

    def add(self, source: socket.socket, read: Callable[[], None], failed: Callable[[], None]) -> None:
        """From now on `read` is called when `source` has something; `failed` after an error in it."""
        self._selector.register(source, selectors.EVENT_READ, (read, failed))

    def remove(self, source: socket.socket) -> None:
        """Twice is harmless."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def close(self) -> None:
        """Ends the thread. Twice is harmless."""
        self.closing = True
        with suppress(OSError):  # closed before
            self._wake_in.send(b"x")
        self.thread.join(timeout=5)
        # Not by the thread, which may see `closing` and be gone before the byte is sent.
        self._wake_in.close()
        self._wake_out.close()

    def _run(self) -> None:
        while not self.closing:
            for key, _ in self._selector.select(timeout=TICK_S):
                read, failed = key.data
                self._guarded(read, failed)
            self._guarded(self._tick, lambda: None)
        self._at_end()
        self._selector.close()

    def _guarded(self, call: Callable[[], None], failed: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} at {os.path.basename(where.filename)}:{where.lineno}"
            if what not in self._logged:  # once each: whoever can cause it can cause it a thousand times
                self._logged.add(what)
                self._log(f"the group's server met an error of ours and goes on: {what}")
            failed()
