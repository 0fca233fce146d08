"""A rank's standing connection to the meeting place, by which it hears of the others' ends at once."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from cyxjax.launch import wire
from cyxjax.launch.topology import join_address

GONE = "the meeting place at {} is gone: the launcher or rank 0 has ended, or its host cannot be reached"


class Membership:
    """This rank's standing connection to the meeting place: its end means the end of the group.

    coordinator: what the meeting place said of jax's coordinator. own_address: the address of this host
    by which it reached the meeting place, so the one other hosts can reach.
    """

    def __init__(
        self,
        connection: socket.socket,
        lines: wire.Lines,
        coordinator: wire.Message,
        heard: list[wire.Message] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.own_address = str(connection.getsockname()[0])
        self._place = join_address(*connection.getpeername()[:2])
        self._socket, self._lines, self._heard = connection, lines, heard or []
        self._leaving = False
        self._all_done = threading.Event()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost(text)` from a thread when a peer or the meeting place is lost."""
        self._socket.settimeout(None)
        threading.Thread(target=self._watch, args=(on_lost,), name="cyxjax-lifeline", daemon=True).start()

    def fail(self, summary: str) -> None:
        """Tells the others, in one line, why this rank is about to end."""
        self._leaving = True
        with suppress(OSError):  # the meeting place may be what failed
            self._socket.settimeout(1.0)
            self._socket.sendall(wire.encode({"error": summary[:2000]}))

    def wait_until_all_are_done(self, timeout_s: float) -> bool:
        """True once every rank has come here; False when some have not within `timeout_s`."""
        with suppress(OSError):
            self._socket.sendall(wire.encode({"done": True}))
        return self._all_done.wait(timeout_s)

    def leave(self) -> None:
        """Says goodbye, so that the closed connection is not taken for a death."""
        self._leaving = True
        with suppress(OSError):
            self._socket.sendall(wire.encode({"bye": True}))
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        why = self._read_until_lost()
        if not self._leaving:
            on_lost(why)

    def _read_until_lost(self) -> str:
        messages = self._heard
        while True:
            for message in messages:
                if "lost" in message:
                    return f"lost rank {message['lost']} (host {message.get('host')}): {message.get('why')}"
                if "all_done" in message:
                    self._leaving = True  # before anybody learns of it: from now on ends are no deaths
                    self._all_done.set()
            try:
                data = self._socket.recv(wire.MAX_LINE)
                messages = self._lines.feed(data)
            except (OSError, wire.BadMessage):
                data = b""
            if not data:
                return GONE.format(self._place)
