"""Coming together before jax starts: reach the meeting place, say who we are, hear where jax listens.

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

GONE = "the meeting place at {} is gone: the launcher or rank 0 has ended, or its host cannot be reached"


class GroupConnection:
    """This rank's standing connection to the meeting place: its end means the end of the group.

    coordinator: what the meeting place said of jax's coordinator. own_address: the address of this host
    by which it reached the meeting place, so the one other hosts can reach.
    """

    def __init__(self, channel: protocol.Channel, coordinator: protocol.Message) -> None:
        self.coordinator = coordinator
        self.own_address = str(channel.socket.getsockname()[0])
        self._place = join_address(*channel.socket.getpeername()[:2])
        self._channel = channel
        self._leaving = False
        self._all_done = threading.Event()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost(text)` from a thread when a peer or the meeting place is lost."""
        threading.Thread(target=self._watch, args=(on_lost,), name="cyxjax-lifeline", daemon=True).start()

    def fail(self, summary: str) -> None:
        """Tells the others, in one line, why this rank is about to end."""
        self._leaving = True
        with suppress(OSError):  # the meeting place may be what failed
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
                    said = {name: protocol.printable(message.get(name)) for name in ("lost", "host", "why")}
                    return f"lost rank {said['lost']} (host {said['host']}): {said['why']}"
                if "all_done" in message:
                    self._leaving = True  # before anybody learns of it: from now on ends are no deaths
                    self._all_done.set()
        return GONE.format(self._place)


RETRY_S = 0.1
LINE_EVERY_S = 10.0
PATIENCE_S = 5.0  # beyond the group's timeout: the meeting place reports first, with names

Log = Callable[[str], None]


def log(line: str) -> None:
    """One line on standard error, marked as ours."""
    print(f"cyxjax: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Deadline:
    """A moment by which something must have happened, with a line now and then until it has."""

    at: float
    started: float

    @classmethod
    def after(cls, seconds: float) -> "_Deadline":
        now = time.monotonic()
        return cls(now + seconds, now)

    @property
    def left_s(self) -> float:
        return max(0.05, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


def versions() -> dict[str, str]:
    """What must be equal on all ranks for their compiled programs to fit together."""
    from importlib import metadata  # slow to load, and the launcher itself does not need it

    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("cyxjax", "jax", "jaxlib"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def join(topology: Topology, facts: Mapping[str, str] | None = None, log: Log = log) -> GroupConnection:
    """Meets the other ranks at MASTER_ADDR:MASTER_PORT and returns when all are there and agree.

    facts: more that must be equal on every rank, such as a hash of the configuration.
    Raises: GroupError that names the cause: name not resolved, connection refused, port held by another
        program, who is missing, or on what the ranks differ; within timeout_ms (and five seconds).
    """
    hello = _hello(topology, {**versions(), **(facts or {})})
    _refuse_loopback_name(topology)
    deadline = _Deadline.after(topology.timeout_ms / 1000 + PATIENCE_S)
    silent = told = False
    while not deadline.passed:
        connection = _dial(topology, deadline, log)
        try:
            membership = _enter(connection, hello, topology, deadline)
            silent = False
        except _Silent:  # thousands come at once, or what listens there is none of ours
            connection.close()
            if not told:
                log(f"rank {topology.rank}: no greeting from {topology.address} yet; trying on")
            silent = told = True
            continue
        except TimeoutError:
            connection.close()
            break
        except BaseException:
            connection.close()
            raise
        if membership is not None:
            return membership
        connection.close()
        time.sleep(RETRY_S)
    if silent:
        raise _stranger(topology)
    raise GroupError(
        f"Timeout waiting for peers: {topology.address} took the connection but did not admit "
        f"rank {topology.rank} within {topology.timeout_ms / 1000:g} s. "
        "HINT: see the log of rank 0, or its launcher's."
    )


def _hello(topology: Topology, facts: dict[str, str]) -> Hello:
    place = (topology.rank, topology.world_size, topology.run_id, topology.restart_count)
    return Hello(*place, socket.gethostname(), os.getpid(), facts)


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


def _dial(topology: Topology, deadline: _Deadline, log: Log) -> socket.socket:
    """A connection to the meeting place; tries until the group's timeout, since rank 0 may start later."""
    give_up = deadline.at - PATIENCE_S
    next_line = deadline.started + LINE_EVERY_S
    while True:
        try:
            return _connect_any(topology, max(0.05, min(3.0, give_up - time.monotonic())))
        except OSError as error:
            if time.monotonic() >= give_up:
                raise _unreachable(topology, error) from error
            if time.monotonic() >= next_line:
                next_line += LINE_EVERY_S
                log(f"rank {topology.rank} waits for {topology.address}: {error.strerror or 'no answer'}")
        time.sleep(RETRY_S)


def _connect_any(topology: Topology, timeout_s: float) -> socket.socket:
    error: OSError | None = None
    for _, where in ports.resolve(topology.master_addr, topology.master_port):
        try:
            return socket.create_connection(where[:2], timeout=timeout_s)
        except OSError as failed:
            error = error or failed
    raise error or OSError("no address")


def _unreachable(topology: Topology, error: OSError) -> CyxjaxError:
    """Keeps apart the three causes that need different remedies."""
    waited = f"for {topology.timeout_ms / 1000:g} s (rank {topology.rank}, from {topology.source})"
    if isinstance(error, socket.gaierror):
        return GroupError(ports.unresolved(topology.master_addr, error))
    if isinstance(error, ConnectionRefusedError):
        return GroupError(
            f"Connection refused to {topology.address} {waited}: the host answers, but nobody listens there. "
            "HINT: start rank 0 on that host, and check MASTER_ADDR and MASTER_PORT."
        )
    return GroupError(
        f"Timeout connecting to {topology.address} {waited}: {error.strerror or 'no answer'}. "
        "HINT: check MASTER_ADDR, the network between the hosts and their firewalls."
    )


class _Silent(Exception):
    """Who took our connection has not greeted us."""


def _enter(
    connection: socket.socket, hello: Hello, topology: Topology, deadline: _Deadline
) -> GroupConnection | None:
    """The membership once the group has formed; None to knock again. Raises: GroupError, _Silent."""
    channel = protocol.Channel(connection)
    ports.keep_alive(connection)
    message: protocol.Message = {**vars(hello), "facts": dict(hello.facts)}
    try:
        met = handshake.introduce(channel, message, topology.token, min(deadline.left_s, PATIENCE_S))
    except TimeoutError as error:
        raise _Silent from error
    except handshake.Refused as error:
        raise _refused(topology, error) from error
    except handshake.UnknownServer as error:
        raise unknown_server(topology.address) from error
    except protocol.BadMessage as error:
        raise _stranger(topology) from error
    except OSError:  # it closed while we spoke
        return None
    try:
        answer = channel.next(deadline.left_s) if met else None
    except protocol.BadMessage as error:
        raise _stranger(topology) from error
    if answer is None or "later" in answer:  # it closed before a word: full, or just starting
        return None
    if isinstance(answer.get("formed"), dict):
        return GroupConnection(channel, answer["formed"])
    if "abort" in answer:
        raise GroupError(protocol.printable(answer["abort"], protocol.MAX_LINE))
    raise _refused(topology, answer.get("refused"))


def _refused(topology: Topology, why: object) -> GroupError:
    return GroupError(f"refused by {topology.address}: {protocol.printable(why, protocol.MAX_LINE)}")


def unknown_server(address: str) -> GroupError:
    """The error for a server that cannot prove the token; it was told nothing but a nonce."""
    return GroupError(
        f"{address} answers like a cyxjax job, but does not know this job's token: it is another job, or an "
        "impostor. HINT: set CYXJAX_TOKEN alike on every host, and check MASTER_ADDR and MASTER_PORT."
    )


def _stranger(topology: Topology) -> GroupError:
    held = ports.holder(topology.master_port)
    return GroupError(
        f"{topology.address} answers, but not as a cyxjax job: {held or 'another program'} holds the port. "
        "HINT: choose another MASTER_PORT, on every host alike."
    )
