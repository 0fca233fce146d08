"""The handshake at the start of each connection: both ends prove the job's token, then the client says hello.

    server -> client   {"cyxjax": 2, "nonce": S}
    client -> server   {"nonce": C, "proof": HMAC(token, "client|S|C")}
    server -> client   {"proof": HMAC(token, "server|S|C")}
    client -> server   its hello, authenticated like every line from here on (protocol.Codec)

A client sends a server that does not know the token nothing but a nonce and a proof. A server gives a client
HANDSHAKE_S and 16 kB, at whatever pace it sends; nothing it sends has an effect beyond its own connection,
except a bounded line in the log.
"""

import errno
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cyxjax.launch.group import protocol
from cyxjax.launch.group.ports import Log, Reactor

HANDSHAKE_S = 5.0  # from the connection to the whole hello
# At once. When another client connects, the oldest connection of the address that has most is dropped, so a
# flood from one address never takes another's place, and leaves its own address the time in which it connects
# so many times (300 connections that come back at once dropped a host that took 0.3 s, with 128 places).
MAX_PENDING = 512
LINE_EVERY_S = 60.0
WRONG_TOKEN = "wrong or missing job token. HINT: set CYXJAX_TOKEN alike on every host of the job."


class Refused(Exception):
    """The server answered that this client may not join, and why."""


class UnknownServer(Exception):
    """The server could not prove that it knows the job's token."""


def introduce(channel: protocol.Channel, hello: protocol.Message, token: str, timeout_s: float) -> bool:
    """The client's part, to its hello; False if the server closes the connection first.

    Raises: BadMessage when what answers is no server of a job; UnknownServer, Refused; TimeoutError.
    """
    greeting = channel.next(timeout_s)
    if greeting is None:
        return False
    theirs, ours = greeting.get("nonce"), protocol.new_nonce()
    if greeting.get("cyxjax") != protocol.PROTOCOL or not isinstance(theirs, str):
        raise protocol.BadMessage("no greeting of a job")
    channel.send({"nonce": ours, "proof": protocol.proof(token, "client", theirs, ours)})
    answer = channel.next(timeout_s)
    if answer is None:
        return False
    if "refused" in answer:
        raise Refused(protocol.printable(answer["refused"]))
    if not protocol.is_proof(answer.get("proof"), protocol.proof(token, "server", theirs, ours)):
        raise UnknownServer
    channel.codec.authenticate(protocol.session_key(token, theirs, ours), is_server=False)
    channel.send(hello)
    return True


@dataclass(eq=False)
class PendingConnection:
    """The server's end of a connection. Once its hello is read, it is the connection of a peer."""

    socket: socket.socket
    address: str
    nonce: str = field(default_factory=protocol.new_nonce)
    since: float = field(default_factory=time.monotonic)
    codec: protocol.Codec = field(default_factory=protocol.Codec)
    is_proved: bool = False

    def send(self, message: protocol.Message) -> bool:
        """Without waiting; False when the client is gone or does not read."""
        try:
            data = self.codec.encode(message)
            return self.socket.send(data) == len(data)
        except OSError:
            return False

    def receive(self) -> bool:
        """Reads what has come; False at the end of the connection. Raises: BadMessage."""
        try:
            data = self.socket.recv(protocol.MAX_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.codec.feed(data)
        return bool(data)


class Handshake:
    """The server's part, with everyone who connects to `listener`, in the thread of `reactor`.

    welcome: called with the connection and its hello; the connection belongs to the callee then and is no
    longer read here. It may `refuse` it. log: gets one line per refusal, at most one in LINE_EVERY_S.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        welcome: Callable[[PendingConnection, protocol.Message], None],
        log: Log,
    ) -> None:
        self._listener, self._token, self._welcome = listener, token, welcome
        # Separate, so that a flood of wrong tokens does not hide what a peer of the job is refused for.
        self._unproved_log, self._peer_log = BoundedLog(log), BoundedLog(log)
        self._pending: dict[PendingConnection, None] = {}  # in the order in which they connected

    def open(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._listener.setblocking(False)
        reactor.add(self._listener, self._accept, lambda: None)

    def tick(self) -> None:
        """Drops connections whose time is over."""
        now = time.monotonic()
        for pending in [pending for pending in self._pending if now - pending.since > HANDSHAKE_S]:
            self.drop(pending)
        self._unproved_log.tick(now)
        self._peer_log.tick(now)

    def close(self) -> None:
        """Drops all pending connections; the listener stays open for the next server on it."""
        self._reactor.remove(self._listener)
        for pending in list(self._pending):
            self.drop(pending)
        self._unproved_log.tick(float("inf"))
        self._peer_log.tick(float("inf"))

    def refuse(self, pending: PendingConnection, why: str, line: str = "") -> None:
        """Answers why this client may not join, drops it, and logs `line`."""
        if line:
            self._peer_log.say(line)
        pending.send({"refused": why})
        self.drop(pending)

    def drop(self, pending: PendingConnection) -> None:
        """Ends the connection. Twice is harmless."""
        self._reactor.remove(pending.socket)
        self._pending.pop(pending, None)
        pending.socket.close()

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except OSError as error:  # the client gave up first, or this process has no descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_one_above(0)
                time.sleep(0.05)  # the client still waits: without a pause this thread would only spin
            return
        self._drop_one_above(MAX_PENDING - 1)
        connection.setblocking(False)
        pending = PendingConnection(connection, str(where[0]))
        self._pending[pending] = None
        self._reactor.add(connection, partial(self._read, pending), partial(self.drop, pending))
        if not pending.send({"cyxjax": protocol.PROTOCOL, "nonce": pending.nonce}):
            self.drop(pending)

    def _drop_one_above(self, number: int) -> None:
        """Drops the oldest of the address with most pending connections, if there are more than `number`."""
        if len(self._pending) > number:
            address = Counter(pending.address for pending in self._pending).most_common(1)[0][0]
            self.drop(next(pending for pending in self._pending if pending.address == address))

    def _read(self, pending: PendingConnection) -> None:
        try:
            is_open = pending.receive()
            while pending in self._pending and (message := pending.codec.next()) is not None:
                self._hear(pending, message)
        except protocol.BadMessage:
            is_open = False
        if not is_open and pending in self._pending:
            self.drop(pending)

    def _hear(self, pending: PendingConnection, message: protocol.Message) -> None:
        if not pending.is_proved:
            self._check_proof(pending, message)
            return
        self._reactor.remove(pending.socket)
        del self._pending[pending]
        try:
            self._welcome(pending, message)
        except OSError:  # it has gone meanwhile
            self.drop(pending)

    def _check_proof(self, pending: PendingConnection, message: protocol.Message) -> None:
        nonces = pending.nonce, str(message.get("nonce"))
        if not protocol.is_proof(message.get("proof"), protocol.proof(self._token, "client", *nonces)):
            self._unproved_log.say(f"refused a connection from {pending.address}: wrong or missing job token")
            self.refuse(pending, WRONG_TOKEN)
            return
        pending.is_proved = True
        pending.send({"proof": protocol.proof(self._token, "server", *nonces)})
        pending.codec.authenticate(protocol.session_key(self._token, *nonces), is_server=True)


class BoundedLog:
    """Passes on the first line at once; of those within the next LINE_EVERY_S their number and the last."""

    def __init__(self, log: Log) -> None:
        self._log, self._next = log, 0.0
        self._held, self._last = 0, ""

    def say(self, line: str) -> None:
        self._held, self._last = self._held + 1, line
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Logs what was held back, when it is time to."""
        if not self._held or now < self._next:
            return
        more = f" ({self._held - 1} more refused since the last such line)" if self._held > 1 else ""
        self._log(self._last + more)
        self._held, self._next = 0, now + LINE_EVERY_S
