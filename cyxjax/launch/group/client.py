"""How a rank joins its group before jax starts: it reaches the server and learns where jax listens.

jax itself aborts or segfaults if a peer is missing or a port is busy; every problem that a person can fix is
found and reported here first, within the group's timeout.
"""

import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cyxjax.errors import GroupError
from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.protocol import Channel, Message
from cyxjax.launch.group.rendezvous import Hello
from cyxjax.launch.group.server import Log
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.output import LINE_EVERY_S, log, printable
from cyxjax.launch.topology import Topology, is_loopback, join_address

GONE = "the server of the group at {} is gone: the launcher or rank 0 has ended, or its host is unreachable"


class GroupConnection:
    """This rank's connection to the server of its group: its end means the end of the group.

    coordinator: what the server sent about jax's coordinator. own_address: the address of this host
    by which it reached the server, so the one other hosts can reach.
    """

    def __init__(self, channel: Channel, coordinator: Message) -> None:
        self.coordinator = coordinator
        self.own_address = str(channel.socket.getsockname()[0])
        self._place = join_address(*channel.socket.getpeername()[:2])
        self._channel = channel
        channel.socket.settimeout(None)  # from now on only its end has a meaning
        self._leaving = False
        self._all_done = threading.Event()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost(text)` from a thread when a peer or the server is lost."""
        threading.Thread(target=self._watch, args=(on_lost,), name="cyxjax-lifeline", daemon=True).start()

    def fail(self, summary: str) -> None:
        """Sends the others, in one line, why this rank is about to end."""
        self._leaving = True
        with suppress(OSError):  # the server may be what failed
            self._channel.socket.settimeout(1.0)
            self._channel.send({"error": summary[:2000]})

    def wait_until_all_are_done(self, timeout_s: float) -> bool:
        """True once every rank has called this; False if some have not within `timeout_s`."""
        with suppress(OSError):
            self._channel.send({"done": True})
        return self._all_done.wait(timeout_s)

    def leave(self) -> None:
        """Announces that this rank leaves, so that its closed connection is not taken for a failure."""
        self._leaving = True
        with suppress(OSError):
            self._channel.send({"bye": True})
        self._channel.close()

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        why = self._read_until_lost()
        if not self._leaving:
            on_lost(why)

    def _read_until_lost(self) -> str:
        with suppress(ValueError):  # as if the connection had ended
            while (message := self._channel.next()) is not None:
                if "lost" in message:
                    lost = f"lost rank {message['lost']} (host {message['host']}): {message['why']}"
                    return printable(lost)
                if "all_done" in message:
                    self._leaving = True  # set first: from now on ended connections are not failures
                    self._all_done.set()
        return GONE.format(self._place)


RETRY_S = 0.1
PATIENCE_S = 5.0  # for one answer; added to the group's timeout too, so that the server reports first
CONNECT_S = 3.0


def versions() -> dict[str, str]:
    """What must be equal on all ranks for their compiled programs to fit together."""
    from cyxjax.launch.program import version_of  # slow to load, and the launcher itself does not need it

    found = {name: version_of(name) or "not installed" for name in ("cyxjax", "jax", "jaxlib")}
    return found | {"python": ".".join(platform.python_version_tuple()[:2])}


@dataclass(frozen=True)
class Server:
    """The server of the group of `place`. who, source: for messages: the client, and who set the address."""

    place: Topology | LocalRanks
    who: str
    source: str

    @property
    def address(self) -> str:
        return join_address(self.place.master_addr, self.place.master_port)

    @property
    def timeout_s(self) -> float:
        return self.place.timeout_ms / 1000


def join(topology: Topology, facts: Mapping[str, str] | None = None, log: Log = log) -> GroupConnection:
    """Meets the other ranks at MASTER_ADDR:MASTER_PORT and returns when all have joined and agree.

    facts: more that must be equal on every rank, such as a hash of the configuration.
    Raises: GroupError that names the cause: name not resolved, connection refused, port held by another
        program, who is missing, or on what the ranks differ; within timeout_ms plus five seconds.
    """
    server = Server(topology, f"rank {topology.rank}", topology.source)
    hello = Hello(
        rank=topology.rank,
        world_size=topology.world_size,
        run_id=topology.run_id,
        generation=topology.restart_count,
        timeout_s=server.timeout_s,
        host=socket.gethostname(),
        pid=os.getpid(),
        facts={**versions(), **(facts or {})},
    )
    refuse_loopback_name(topology, topology.local_world_size)
    end = time.monotonic() + server.timeout_s
    while True:
        channel = connect(server, vars(hello), log, until=end)
        channel.socket.settimeout(max(0.0, end - time.monotonic()) + PATIENCE_S)
        answer = None
        with suppress(ValueError):
            answer = channel.next()
        if answer is not None and "formed" in answer:
            return GroupConnection(channel, answer["formed"])
        channel.close()
        if answer is not None and "later" not in answer:
            why = answer.get("abort") or f"refused by {server.address}: {answer.get('refused')}"
            raise GroupError(printable(why, protocol.MAX_LINE))
        if time.monotonic() >= end:
            raise GroupError(
                f"Timeout waiting for peers: {server.address} accepted the connection but did not admit "
                f"{server.who} within {server.timeout_s:g} s. HINT: see the log of rank 0, or its launcher's."
            )
        time.sleep(RETRY_S)


def connect(
    server: Server,
    hello: Message,
    log: Log,
    *,
    sleep: Callable[[float], object] = time.sleep,
    until: float | None = None,
) -> Channel:
    """A connection on which `server` has proved the token and was sent `hello`; retries until its timeout.

    sleep: waits between tries. until: on the monotonic clock, for an earlier end of the tries.
    Raises: GroupError; whatever `sleep` raises.
    """
    end = time.monotonic() + server.timeout_s if until is None else until
    next_line = time.monotonic() + LINE_EVERY_S
    while True:
        try:
            return _try_connect(server, hello)
        except OSError as error:
            if time.monotonic() >= end:
                raise _unreachable(server, error) from error
            if time.monotonic() >= next_line:
                next_line += LINE_EVERY_S
                log(f"{server.who} waits for {server.address}: {_why(error)}")
        sleep(RETRY_S)


def _try_connect(server: Server, hello: Message) -> Channel:
    """Raises: OSError for a failure that may be temporary; GroupError."""
    address, wait_s = (server.place.master_addr, server.place.master_port), min(CONNECT_S, server.timeout_s)
    channel = Channel(socket.create_connection(address, timeout=wait_s))
    try:
        ports.keep_alive(channel.socket)
        channel.socket.settimeout(PATIENCE_S)
        _introduce(channel, hello, server)
        channel.socket.settimeout(None)
    except BaseException:
        channel.close()
        raise
    return channel


def _introduce(channel: Channel, hello: Message, server: Server) -> None:
    """The client's part of the handshake, to its hello (see server.py). Raises: as _try_connect."""
    ours = secrets.token_hex(16)
    try:
        greeting = _answer(channel)
        if greeting["cyxjax"] != protocol.PROTOCOL:
            raise ValueError("another version of the protocol")
        theirs = str(greeting["nonce"])
        channel.send({"nonce": ours, "proof": protocol.proof(server.place.token, "client", theirs, ours)})
        answer = _answer(channel)
    except (ValueError, KeyError) as error:
        raise GroupError(
            f"{server.address} answers, but not as a cyxjax job: another program holds the port. "
            "HINT: choose another MASTER_PORT, the same on every host."
        ) from error
    if "refused" in answer:
        raise GroupError(printable(f"refused by {server.address}: {answer['refused']}"))
    if not protocol.is_proof(answer.get("proof"), protocol.proof(server.place.token, "server", theirs, ours)):
        raise GroupError(
            f"{server.address} answers like a cyxjax job, but does not know this job's token: it may be "
            "another job. HINT: set one CYXJAX_TOKEN on all hosts, and check MASTER_ADDR and MASTER_PORT."
        )
    channel.authenticate(protocol.session_key(server.place.token, theirs, ours), is_server=False)
    channel.send(hello)


def _answer(channel: Channel) -> Message:
    answer = channel.next()
    if answer is None:  # thousands connect at once, or another program listens there
        raise ConnectionError("it accepts the connection, but does not answer as a job")
    return answer


def _unreachable(server: Server, error: OSError) -> GroupError:
    """Keeps apart the three causes that need different remedies."""
    waited = f"for {server.timeout_s:g} s ({server.who}, from {server.source})"
    if isinstance(error, socket.gaierror):
        return GroupError(ports.unresolved(server.place.master_addr, error))
    if isinstance(error, ConnectionRefusedError):
        return GroupError(
            f"Connection refused to {server.address} {waited}: the host answers, but nothing listens there. "
            "HINT: start rank 0, or its launcher, on that host, and check MASTER_ADDR and MASTER_PORT."
        )
    return GroupError(
        f"Timeout connecting to {server.address} {waited}: {_why(error)}. "
        "HINT: check MASTER_ADDR and MASTER_PORT, the network between the hosts and their firewalls."
    )


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def refuse_loopback_name(place: Topology | LocalRanks, here: int) -> None:
    """A host's name that means 'this host' everywhere (Debian's 127.0.1.1) would split the group.

    127.0.0.1 itself is accepted: it means several launchers on one host. here: ranks of this host, 0 for an
    unknown number.
    """
    name = place.master_addr
    if not 0 < here < place.world_size or is_loopback(name):
        return
    with suppress(socket.gaierror):  # connecting reports it, after trying for a while
        address = ports.resolve(name, place.master_port)[0][1][0]
        if is_loopback(address):
            raise GroupError(
                f"MASTER_ADDR={name} resolves to {address}, a loopback address, but only {here} of "
                f"{place.world_size} ranks are on this host. HINT: give an address other hosts can reach."
            )
