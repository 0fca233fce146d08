"""The door of a meeting place: who proves to be of the job is let in, everybody else is not.

Strangers get nothing from it: they have five seconds and 16 kB, whatever pace they keep, to prove that they
know the job's token. Nothing they send leaves the connection it came on, except a bounded line in the log.
"""

import errno
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from cyxjax.launch.group import protocol
from cyxjax.launch.group.reactor import Log, Reactor

STRANGER_S = 5.0  # time to say hello, all of it
MAX_STRANGERS = 128  # at once; when another knocks one goes, of the address that has most
LINE_EVERY_S = 60.0
WRONG_TOKEN = "wrong or missing job token. HINT: set CYXJAX_TOKEN alike on every host of the job."


@dataclass(eq=False)
class PendingConnection:
    """A connection that came to the door. After its hello, `lines` and `early` hold what else it has said."""

    socket: socket.socket
    address: str
    nonce: str = field(default_factory=protocol.new_nonce)
    since: float = field(default_factory=time.monotonic)
    lines: protocol.Lines = field(default_factory=protocol.Lines)
    early: list[protocol.Message] = field(default_factory=list)

    def send(self, message: protocol.Message) -> bool:
        """Without waiting; False when it is gone or does not read."""
        try:
            data = protocol.encode(message)
            return self.socket.send(data) == len(data)
        except OSError:
            return False


class Handshake:
    """Greets whoever connects to `listener`, in the thread of `reactor`.

    welcome: called with the guest and its hello once the hello has proved `token`; the guest is its own then,
    no longer watched here. It may `refuse` it. log: gets one line per refusal, at most one in LINE_EVERY_S.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        welcome: Callable[[PendingConnection, protocol.Message], None],
        log: Log,
    ) -> None:
        self._listener, self._token, self._welcome = listener, token, welcome
        # Apart, so that the noise of strangers does not hide what a rank of the job is told.
        self._of_strangers, self._of_known = BoundedLog(log), BoundedLog(log)
        self._strangers: list[PendingConnection] = []  # in the order in which they came

    def open(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._listener.setblocking(False)
        reactor.add(self._listener, self._accept, lambda: None)

    def tick(self) -> None:
        """Drops who has not said hello in time."""
        now = time.monotonic()
        for guest in [guest for guest in self._strangers if now - guest.since > STRANGER_S]:
            self.drop(guest)
        self._of_strangers.tick(now)
        self._of_known.tick(now)

    def close(self) -> None:
        """Drops all strangers; the listener stays open for whoever opens the next door on it."""
        self._reactor.remove(self._listener)
        for guest in list(self._strangers):
            self.drop(guest)
        self._of_strangers.tick(float("inf"))
        self._of_known.tick(float("inf"))

    def refuse(self, guest: PendingConnection, why: str, line: str = "") -> None:
        """Tells `guest`, which has proved the token, why it may not come in, and the log in one `line`."""
        if line:
            self._of_known.say(line)
        guest.send({"refused": why})
        self.drop(guest)

    def drop(self, guest: PendingConnection) -> None:
        """Ends the connection. Twice is harmless."""
        self._reactor.remove(guest.socket)
        with suppress(ValueError):
            self._strangers.remove(guest)
        guest.socket.close()

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except OSError as error:  # the knocker gave up first, or this process has no descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_one_above(0)
                time.sleep(0.05)  # the knocker still knocks: without a pause this thread would only turn
            return
        self._drop_one_above(MAX_STRANGERS - 1)
        connection.setblocking(False)
        guest = PendingConnection(connection, str(where[0]))
        self._strangers.append(guest)
        self._reactor.add(connection, partial(self._read, guest), partial(self.drop, guest))
        if not guest.send({"cyxjax": protocol.PROTOCOL, "nonce": guest.nonce}):
            self.drop(guest)

    def _drop_one_above(self, number: int) -> None:
        """The oldest stranger of the address that has most here, when there are more than `number`."""
        if len(self._strangers) > number:
            crowd = Counter(guest.address for guest in self._strangers).most_common(1)[0][0]
            self.drop(next(guest for guest in self._strangers if guest.address == crowd))

    def _read(self, guest: PendingConnection) -> None:
        try:
            data = guest.socket.recv(protocol.MAX_LINE)
            messages = guest.lines.feed(data)
        except BlockingIOError:
            return
        except (OSError, protocol.BadMessage):
            data, messages = b"", []
        if messages:
            guest.early = messages[1:]
            self._greet(guest, messages[0])
        elif not data:
            self.drop(guest)

    def _greet(self, guest: PendingConnection, hello: protocol.Message) -> None:
        if not protocol.verify(self._token, guest.nonce, hello):
            self._of_strangers.say(f"refused a connection from {guest.address}: wrong or missing job token")
            self.refuse(guest, WRONG_TOKEN)
            return
        self._reactor.remove(guest.socket)
        self._strangers.remove(guest)
        try:
            self._welcome(guest, hello)
        except OSError:  # it has gone meanwhile
            self.drop(guest)


class BoundedLog:
    """Passes on the first line at once; of what follows within LINE_EVERY_S the number and the last one."""

    def __init__(self, log: Log) -> None:
        self._log, self._next = log, 0.0
        self._held, self._last = 0, ""

    def say(self, line: str) -> None:
        self._held, self._last = self._held + 1, line
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Says what was held back, when it is time to."""
        if not self._held or now < self._next:
            return
        more = f" ({self._held - 1} more refused since the last such line)" if self._held > 1 else ""
        self._log(self._last + more)
        self._held, self._next = 0, now + LINE_EVERY_S
