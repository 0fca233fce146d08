"""The one server of a job, on one port: launchers and ranks connect to it and stay connected until they end.

It runs as a thread in the first host's launcher, in the parent of spawned processes, or in rank 0 where the
ranks are started by hand.
"""

import socket
import time
from collections.abc import Callable

from cyxjax.launch.group import protocol
from cyxjax.launch.group.handshake import Handshake, PendingConnection
from cyxjax.launch.group.hosts import Hosts
from cyxjax.launch.group.reactor import Log, Reactor
from cyxjax.launch.group.rendezvous import Rendezvous
from cyxjax.launch.group.roster import Job, Roster


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
