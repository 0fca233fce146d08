"""How a rank joins its group before jax starts: it reaches the server and learns where jax listens.

jax itself aborts or segfaults where a peer is missing or a port is busy; everything a person can do
something about is found here first, within the group's timeout, and named.
"""

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cyxjax.errors import CyxjaxError, GroupError
from cyxjax.launch.group import handshake, ports, protocol
from cyxjax.launch.group.roster import Hello
from cyxjax.launch.topology import Topology, is_loopback, join_address

GONE = "the server of the group at {} is gone: the launcher or rank 0 has ended, or its host is unreachable"


class GroupConnection:
    """This rank's connection to the server of its group: its end means the end of the group.

    coordinator: what the server sent of jax's coordinator. own_address: the address of this host
    by which it reached the server, so the one other hosts can reach.
    """

    def __init__(self, channel: protocol.Channel, coordinator: protocol.Message) -> None:
        self.coordinator = coordinator
        self.own_address = str(channel.socket.getsockname()[0])
        self._place = join_address(*channel.socket.getpeername()[:2])
        self._channel = channel
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
        """True once every rank has come here; False when some have not within `timeout_s`."""
        with suppress(OSError):
            self._channel.send({"done": True})
        return self._all_done.wait(timeout_s)

    def leave(self) -> None:
        """Says goodbye, so that the closed connection is not taken for a death."""
        self._leaving = True
        with suppress(OSError):
            self._channel.send({"bye": True})
        self._channel.close()

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        why = self._read_until_lost()
        if not self._leaving:
            on_lost(why)

    def _read_until_lost(self) -> str:
        with suppress(protocol.BadMessage):  # as if the connection had ended
            while (message := self._channel.next()) is not None:
                if "lost" in message:
                    loss = {name: protocol.printable(message.get(name)) for name in ("lost", "host", "why")}
                    return f"lost rank {loss['lost']} (host {loss['host']}): {loss['why']}"
                if "all_done" in message:
                    self._leaving = True  # before anybody learns of it: from now on ends are no deaths
                    self._all_done.set()
        return GONE.format(self._place)


RETRY_S = 0.1
LINE_EVERY_S = 10.0
PATIENCE_S = 5.0  # beyond the group's timeout: the server reports first, with names
CONNECT_S = 3.0

Log = Callable[[str], None]


def log(line: str) -> None:
    """One line on standard error, marked as ours."""
    print(f"cyxjax: {line}", file=sys.stderr, flush=True)


def versions() -> dict[str, str]:
    """What must be equal on all ranks for their compiled programs to fit together."""
    from cyxjax.launch.program import version_of  # slow to load, and the launcher itself does not need it

    found = {name: version_of(name) or "not installed" for name in ("cyxjax", "jax", "jaxlib")}
    return found | {"python": ".".join(platform.python_version_tuple()[:2])}


@dataclass(frozen=True)
class Server:
    """Where the server of a group listens. who, source: for messages: who asks, and who set the address."""

    host: str
    port: int
    token: str
    timeout_s: float
    who: str
    source: str

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def join(topology: Topology, facts: Mapping[str, str] | None = None, log: Log = log) -> GroupConnection:
    """Meets the other ranks at MASTER_ADDR:MASTER_PORT and returns when all are there and agree.

    facts: more that must be equal on every rank, such as a hash of the configuration.
    Raises: GroupError that names the cause: name not resolved, connection refused, port held by another
        program, who is missing, or on what the ranks differ; within timeout_ms (and five seconds).
    """
    place = (topology.rank, topology.world_size, topology.run_id, topology.restart_count)
    hello = vars(Hello(*place, socket.gethostname(), os.getpid(), {**versions(), **(facts or {})}))
    _refuse_loopback_name(topology)
    where = (topology.master_addr, topology.master_port, topology.token, topology.timeout_ms / 1000)
    server = Server(*where, f"rank {topology.rank}", topology.source)
    end = time.monotonic() + server.timeout_s + PATIENCE_S
    while True:
        channel = connect(server, hello, log, until=end - PATIENCE_S)
        try:
            answer = channel.next(max(0.05, end - time.monotonic()))
        except TimeoutError:
            channel.close()
            break
        except protocol.BadMessage as error:
            channel.close()
            raise other_program(server) from error
        if answer is not None and isinstance(answer.get("formed"), dict):
            return GroupConnection(channel, answer["formed"])
        channel.close()
        if answer is not None and "abort" in answer:
            raise GroupError(protocol.printable(answer["abort"], protocol.MAX_LINE))
        if answer is not None and "later" not in answer:
            raise _refused(server, answer.get("refused"))
        if time.monotonic() >= end - PATIENCE_S:
            break
        time.sleep(RETRY_S)
    raise GroupError(
        f"Timeout waiting for peers: {server.address} took the connection but did not admit "
        f"{server.who} within {server.timeout_s:g} s. HINT: see the log of rank 0, or its launcher's."
    )


def connect(
    server: Server,
    hello: protocol.Message,
    log: Log,
    *,
    sleep: Callable[[float], object] = time.sleep,
    until: float | None = None,
) -> protocol.Channel:
    """A connection on which `server` has proved the token and was sent `hello`; tries for its timeout.

    sleep: waits between tries. until: on the monotonic clock, for an earlier end of the tries.
    Raises: GroupError; whatever `sleep` raises.
    """
    began = time.monotonic()
    end = began + server.timeout_s if until is None else until
    next_line, silent, logged = began + LINE_EVERY_S, False, False
    while True:
        error: Exception | None = None
        try:
            channel = _try_connect(server, hello)
            if channel is not None:
                return channel
            silent = False  # it closed the connection: full, or just starting
        except TimeoutError as failed:  # of the handshake, or of the connection
            error, silent = failed, isinstance(failed, _NoGreeting)
        except OSError as failed:
            error, silent = failed, False
        if time.monotonic() >= end:
            raise other_program(server) if silent else _unreachable(server, error)
        if silent and not logged:  # thousands connect at once, or another program listens there
            logged = True
            log(f"{server.who}: no greeting from {server.address} yet; trying again")
        elif time.monotonic() >= next_line:
            next_line += LINE_EVERY_S
            log(f"{server.who} waits for {server.address}: {getattr(error, 'strerror', '') or 'no answer'}")
        sleep(RETRY_S)


class _NoGreeting(TimeoutError):
    """The connection stands, but the handshake has not ended in time."""


def _try_connect(server: Server, hello: protocol.Message) -> protocol.Channel | None:
    """None when the server closes the connection first. Raises: OSError, _NoGreeting; GroupError."""
    channel, met = protocol.Channel(_connect_any(server)), False
    try:
        ports.keep_alive(channel.socket)
        met = handshake.introduce(channel, hello, server.token, PATIENCE_S)
    except TimeoutError as error:
        raise _NoGreeting from error
    except ConnectionError:
        pass
    except handshake.Refused as error:
        raise _refused(server, error) from error
    except handshake.UnknownServer as error:
        raise _unknown_server(server) from error
    except protocol.BadMessage as error:
        raise other_program(server) from error
    finally:
        if not met:
            channel.close()
    return channel if met else None


def _connect_any(server: Server) -> socket.socket:
    error: OSError | None = None
    for _, where in ports.resolve(server.host, server.port):
        try:
            return socket.create_connection(where[:2], timeout=min(CONNECT_S, server.timeout_s))
        except OSError as failed:
            error = error or failed
    raise error or OSError("no address")


def _unreachable(server: Server, error: Exception | None) -> CyxjaxError:
    """Keeps apart the three causes that need different remedies."""
    waited = f"for {server.timeout_s:g} s ({server.who}, from {server.source})"
    if isinstance(error, socket.gaierror):
        return GroupError(ports.unresolved(server.host, error))
    if isinstance(error, ConnectionRefusedError):
        return GroupError(
            f"Connection refused to {server.address} {waited}: the host answers, but nothing listens there. "
            "HINT: start rank 0, or its launcher, on that host, and check MASTER_ADDR and MASTER_PORT."
        )
    return GroupError(
        f"Timeout connecting to {server.address} {waited}: {getattr(error, 'strerror', '') or 'no answer'}. "
        "HINT: check MASTER_ADDR, the network between the hosts and their firewalls."
    )


def _refused(server: Server, why: object) -> GroupError:
    return GroupError(f"refused by {server.address}: {protocol.printable(why, protocol.MAX_LINE)}")


def _unknown_server(server: Server) -> GroupError:
    """The error for a server that cannot prove the token; it was sent nothing but a nonce and a proof."""
    return GroupError(
        f"{server.address} answers like a cyxjax job, but does not know this job's token: it may be "
        "another job. HINT: set CYXJAX_TOKEN alike on every host, and check MASTER_ADDR and MASTER_PORT."
    )


def other_program(server: Server) -> GroupError:
    """The error for what listens there and is no server of a group."""
    held = ports.holder(server.port)
    return GroupError(
        f"{server.address} answers, but not as a cyxjax job: {held or 'another program'} holds the port. "
        "HINT: choose another MASTER_PORT, on every host alike."
    )


def _refuse_loopback_name(topology: Topology) -> None:
    """A host's name that means 'this host' everywhere (Debian's 127.0.1.1) would split the group.

    127.0.0.1 itself is taken at its word: several launchers on one host.
    """
    name, spread = topology.master_addr, 0 < topology.local_world_size < topology.world_size
    if not spread or is_loopback(name):
        return
    try:
        addresses = [where[0] for _, where in ports.resolve(name, topology.master_port)]
    except socket.gaierror:
        return  # dialling reports it, after trying for a while
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        raise GroupError(
            f"MASTER_ADDR={name} is {addresses[0]}, the loopback address, but only "
            f"{topology.local_world_size} of {topology.world_size} ranks are on this host. HINT: give an "
            "address other hosts can reach."
        )
