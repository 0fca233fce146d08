"""The server of a job's group: one thread, on one port, that admits clients that prove the job's token.

Launchers and ranks connect to it and stay connected until they end. A connection begins with:

    server -> client   {"cyxjax": 2, "nonce": S}
    client -> server   {"nonce": C, "proof": HMAC(token, "client|S|C")}
    server -> client   {"proof": HMAC(token, "server|S|C")}
    client -> server   its hello, authenticated like every line from here on (protocol.Channel)

A client sends a server that does not know the token nothing but a nonce and a proof (client.py). A server
allows a client HANDSHAKE_S seconds and 16 kB; nothing the client sends has an effect beyond its own
connection, except a bounded line in the log.
"""

import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.protocol import Channel, Message

TICK_S = 0.5
HANDSHAKE_S = 5.0  # from the connection to the whole hello
# Handshakes at the same time. One more drops the oldest of the address that has the most: a flood displaces
# only its own address, and there only clients slower than 512 connections (with a limit of 128, 300 clients
# that reconnected immediately displaced a host that took 0.3 s).
MAX_PENDING = 512
LINE_EVERY_S = 60.0
WRONG_TOKEN = "wrong or missing job token. HINT: set the same CYXJAX_TOKEN on every host of the job."
BY_HAND = "the ranks of this job were started without a launcher. HINT: start all hosts the same way."

Log = Callable[[str], None]


@dataclass(eq=False)
class Peer:
    """The server's end of a connection. hear: takes each of its messages. lost: is called once at its end."""

    channel: Channel
    address: str
    hear: Callable[[Message], None] = lambda message: None
    lost: Callable[[], None] = lambda: None
    is_open: bool = True
    nonce: str = field(default_factory=partial(secrets.token_hex, 16))
    since: float = field(default_factory=time.monotonic)

    def send(self, message: Message) -> None:
        """Sends without waiting; a peer that does not read is noticed when its connection ends."""
        with suppress(OSError):
            self.channel.send(message)


class Admitting(Protocol):
    """Takes peers that have proved the token: sets `hear` and `lost` of each, or refuses it."""

    def welcome(self, peer: Peer, hello: Message) -> None:
        """A new peer."""

    def tick(self) -> None:
        """Called twice per second."""

    def close(self) -> None:
        """Called before the server ends all connections."""


class GroupServer:
    """Admits clients that prove `token`: ranks to the start that is open, launchers to `hosts`.

    log: gets a line per refusal, at most one in LINE_EVERY_S of each kind.
    """

    def __init__(self, listener: socket.socket, token: str, log: Log) -> None:
        self.ranks: Admitting | None = None
        self.hosts: Admitting | None = None
        self.thread = threading.Thread(target=self._run, name="cyxjax-group", daemon=True)
        self._listener, self._token, self._log = listener, token, log
        self._selector = selectors.DefaultSelector()
        self._pending: dict[Peer, None] = {}  # in the order in which they connected
        # Separate, so that a flood of wrong tokens does not hide why a peer of the job is refused.
        self._next_line = {"token": 0.0, "peer": 0.0, "error": 0.0}
        self._closing = False

    def start(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.thread.start()

    def close(self) -> None:
        """Ends the thread and every connection. A second call does no harm."""
        self._closing = True
        with suppress(OSError):  # wakes the thread immediately, on Linux
            self._listener.shutdown(socket.SHUT_RDWR)
        if self.thread.is_alive():
            self.thread.join(timeout=5)

    def add(self, connection: socket.socket, address: str) -> Peer:
        """Reads `connection` from now on. Call it in the server's thread, or before `start`."""
        connection.setblocking(False)
        peer = Peer(Channel(connection), address)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def refuse(self, peer: Peer, why: str, kind: str = "peer") -> None:
        """Sends the client the reason why it may not join, drops it, and logs the reason."""
        self._say(kind, f"refused a connection from {peer.address}: {why}")
        peer.send({"refused": why})
        self.drop(peer)

    def put_off(self, peer: Peer) -> None:
        """Tells the client to try again later, and drops it."""
        peer.send({"later": True})
        self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Ends the connection. A second call does nothing."""
        if peer.is_open:
            peer.is_open = False
            self._pending.pop(peer, None)
            self._selector.unregister(peer.channel.socket)
            peer.channel.socket.close()
            peer.lost()

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(timeout=TICK_S):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                self._tick()
        finally:
            for admitting in filter(None, (self.hosts, self.ranks)):
                admitting.close()
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    self.drop(key.data)
            self._selector.close()

    def _tick(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._pending if now - peer.since > HANDSHAKE_S]:
            self.drop(peer)
        for admitting in filter(None, (self.hosts, self.ranks)):
            admitting.tick()

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except OSError:  # the client gave up first, or no descriptor is left: pause, not to spin
            time.sleep(0.05)
            return
        if len(self._pending) >= MAX_PENDING:
            crowded = Counter(peer.address for peer in self._pending).most_common(1)[0][0]
            self.drop(next(peer for peer in self._pending if peer.address == crowded))
        peer = self.add(connection, str(where[0]))
        peer.hear = partial(self._check_proof, peer)
        self._pending[peer] = None
        peer.send({"cyxjax": protocol.PROTOCOL, "nonce": peer.nonce})

    def _read(self, peer: Peer) -> None:
        """Reads what has arrived; any error in it, even in our code, ends the connection, not the thread."""
        if not peer.is_open:  # dropped in this round
            return
        try:
            data = peer.channel.socket.recv(protocol.MAX_LINE)
            peer.channel.feed(data)
            while peer.is_open and (message := peer.channel.pop()) is not None:
                peer.hear(message)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it has gone, or these are no messages
            data = b""
        except Exception as error:
            self._say("error", f"an internal error ends the connection of {peer.address}: {error!r}")
            data = b""
        if not data:
            self.drop(peer)

    def _check_proof(self, peer: Peer, message: Message) -> None:
        nonces = peer.nonce, str(message.get("nonce"))
        if not protocol.is_proof(message.get("proof"), protocol.proof(self._token, "client", *nonces)):
            self.refuse(peer, WRONG_TOKEN, "token")
            return
        peer.send({"proof": protocol.proof(self._token, "server", *nonces)})
        peer.channel.authenticate(protocol.session_key(self._token, *nonces), is_server=True)
        peer.hear = partial(self._welcome, peer)

    def _welcome(self, peer: Peer, hello: Message) -> None:
        del self._pending[peer]
        ports.keep_alive(peer.channel.socket)
        admitting = self.hosts if "nproc" in hello else self.ranks
        if admitting is not None:
            admitting.welcome(peer, hello)
        elif "nproc" in hello:
            self.refuse(peer, BY_HAND)
        else:
            self.put_off(peer)

    def _say(self, kind: str, line: str) -> None:
        now = time.monotonic()
        if now >= self._next_line[kind]:
            self._next_line[kind] = now + LINE_EVERY_S
            self._log(line)
