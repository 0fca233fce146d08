"""What the first host of a job holds: the port, the server of the group, and jax's coordination service.

The one server of a job, on one port: launchers and ranks connect to it and stay connected until they end. It
runs as a thread in the first host's launcher, in the parent of spawned processes, or in rank 0 where the
ranks are started by hand.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cyxjax.launch import output
from cyxjax.launch.backend import jax_private
from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.handshake import Handshake, PendingConnection
from cyxjax.launch.group.hosts import Hosts
from cyxjax.launch.group.ports import Log, Reactor
from cyxjax.launch.group.rendezvous import Rendezvous
from cyxjax.launch.group.roster import Job, Roster
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.topology import join_address

LOAD_AFTER_S = 0.1
LONGEST_PATH = 100  # of a Unix socket: 108 bytes on Linux, 104 on macOS


def warn_without_token(place: LocalRanks, log: Log) -> None:
    """One line for a job without a secret, which only a launcher of all its ranks can make up by itself."""
    if not (place.token or place.is_alone):
        log(f"CYXJAX_TOKEN is not set: whoever reaches {place.master_addr} can join this job")


class GroupServer:
    """Admits who proves `token` on `listener`: ranks to the start that is open, launchers to `hosts`.

    open_start, close_start: from the server's thread, or before `start`.
    """

    def __init__(self, listener: socket.socket, token: str, log: Log) -> None:
        self._log = log
        self.handshake = Handshake(listener, token, self._welcome, log)
        self.reactor = Reactor("cyxjax-group", self._tick, self._end, log)
        self.ranks: Rendezvous | None = None
        self.hosts: Hosts | None = None

    def start(self) -> "GroupServer":
        self.handshake.open(self.reactor)
        self.reactor.start()
        return self

    def open_start(self, job: Job, open_coordinator: Callable[[Roster], protocol.Message]) -> Rendezvous:
        """From now on the ranks of `job` may join."""
        self.ranks = Rendezvous(job, open_coordinator, self.reactor, self.handshake, self._log)
        return self.ranks

    def close_start(self) -> None:
        """Ends the connections of all ranks. Twice is harmless."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None

    def wait_until_empty(self, timeout_s: float) -> None:
        """Returns when every rank has left, or after `timeout_s`."""
        end, ranks = time.monotonic() + timeout_s, self.ranks
        while ranks is not None and ranks.peers and time.monotonic() < end:
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the thread and every connection; the listener stays open. Twice is harmless."""
        self.reactor.close()

    # -- the thread ---------------------------------------------------------------------------------

    def _welcome(self, connection: PendingConnection, hello: protocol.Message) -> None:
        if "nproc" in hello and self.hosts is not None:
            self.hosts.welcome(connection, hello)
        elif "nproc" in hello:
            why = "the ranks of this job were started without a launcher. HINT: start all hosts alike."
            self.handshake.refuse(connection, why, f"refused a launcher at {connection.address}")
        elif self.ranks is not None:
            self.ranks.welcome(connection, hello)
        else:
            connection.send({"later": True})
            self.handshake.drop(connection)

    def _tick(self) -> None:
        self.handshake.tick()
        if self.ranks is not None:
            self.ranks.tick()
        if self.hosts is not None:
            self.hosts.tick()

    def _end(self) -> None:
        if self.hosts is not None:
            self.hosts.close()
        self.close_start()
        self.handshake.close()


class Coordinator:
    """One listener and one server for the job; a coordination service, where it `serves`, for each start.

    With the service in a launcher no rank is special: rank 0 may die like any other. Where no launcher is
    (ranks started by hand), rank 0 serves at the address it is sent, which is kept free for it.
    Raises: GroupError when the port is held by another process; ConfigError when the address is not ours.
    """

    def __init__(self, place: LocalRanks, log: Log = output.say, *, serves: bool = True) -> None:
        self._listener = ports.listen(place.master_addr, place.master_port)
        self.place = replace(place, master_port=self._listener.getsockname()[1])
        self.server = GroupServer(self._listener, place.token, log)
        self._log, self._serves = log, serves
        self._service: jax_private.CoordinationService | None = None
        self._reserved: socket.socket | None = None
        self._folder: str | None = None
        # Loading jaxlib takes 0.1 s, which the ranks need anyway to start; they are started first. No daemon:
        # a process that ends while a thread loads native code may abort.
        self._load = threading.Timer(LOAD_AFTER_S, jax_private.can_serve)
        self._load.name = "cyxjax-load"
        if serves:
            # Its service would narrate every connection of every start on our standard error.
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
            self._load.start()

    def open(self, start: int, folder: str | None = None) -> None:
        """Admits the ranks of the only start, where no launcher leads it. folder: as in `lead`."""
        self._folder = folder
        self._open_start(start, self.place.world_size)
        self.server.start()

    def lead(self, size: Size, max_restarts: int, folder: str | None = None) -> protocol.Channel:
        """Leads the launchers of a job of `size`. Returns: the connection of the one on this host.

        folder: closed to other users, for a socket.
        """
        server, self._folder = self.server, folder
        starts = (lambda number, world: self._open_start(number, world, is_led=True)), self._close_start
        server.hosts = Hosts(
            self.place, size, max_restarts, *starts, server.reactor, server.handshake, self._log
        )
        channel = server.hosts.connect()
        server.start()
        return channel

    def end(self) -> None:
        """Closes everything, the listener too. The ranks must have ended. Twice is harmless."""
        self._load.cancel()
        self.server.close()
        self._close_start()
        self._listener.close()

    def _open_start(self, number: int, world_size: int, *, is_led: bool = False) -> None:
        place = self.place
        job = Job(world_size, place.run_id, number, place.timeout_ms / 1000, is_led)
        self.server.open_start(job, self._coordinate)

    def _close_start(self) -> None:
        """Ends the start's connections and service."""
        self.server.close_start()
        if self._service is not None:
            self._service.close()
        if self._reserved is not None:
            self._reserved.close()
        self._service = self._reserved = None

    def _coordinate(self, roster: Roster) -> protocol.Message:
        """Starts the service once all ranks are here; where this jaxlib cannot, rank 0 is to do it.

        jax authenticates none of its clients. Where all ranks are this process's children the service listens
        on a Unix socket in a folder that is closed to other users; else on the address of MASTER_ADDR alone.
        """
        served = self._serves and jax_private.can_serve()
        address = self._private_address(roster.job.generation) if served else None
        if address is None:
            self._reserved, port = ports.reserve(self.place.master_addr)
            address = join_address(self.place.master_addr, port)
        if served:
            self._service = jax_private.CoordinationService(address, len(roster.present))
        return {"address": address, "served": served}

    def _private_address(self, start: int) -> str | None:
        """A Unix socket that only this user reaches; None across hosts, or where the system has none."""
        if self._folder is None or not self.place.is_alone or not hasattr(socket, "AF_UNIX"):
            return None
        path = os.path.join(self._folder, f"start_{start}.jax")
        return f"unix:{path}" if len(path) < LONGEST_PATH else None
