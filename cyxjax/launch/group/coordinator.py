"""What the first host of a job holds: the port, the server of the group, and jax's coordination service.

The server runs as a thread in the first host's launcher, in the parent of spawned processes, or in rank 0
where the ranks are started by hand.
"""

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from cyxjax.launch import output
from cyxjax.launch.backend import jax_private
from cyxjax.launch.group import ports
from cyxjax.launch.group.controller import Controller, Size
from cyxjax.launch.group.group_start import Budget, Member
from cyxjax.launch.group.protocol import Channel, Message
from cyxjax.launch.group.rendezvous import Rendezvous
from cyxjax.launch.group.server import GroupServer, Log, Peer
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.topology import join_address
from cyxjax.redaction import describe

LOAD_AFTER_S = 0.1
LONGEST_PATH = 100  # of a Unix socket: 108 bytes, the folder's name included


def warn_without_token(place: LocalRanks, log: Log) -> None:
    """Warns of a job without a token; only a launcher that starts all ranks can create the token itself."""
    if not (place.token or place.is_alone):
        log(f"CYXJAX_TOKEN is not set: whoever reaches {place.master_addr} can join this job")


class Coordinator:
    """One listener and one server for the job; a coordination service, where it `serves`, for each start.

    With the service in a launcher no rank is special: rank 0 may die like any other. Without a launcher
    (ranks started by hand), rank 0 serves at the address it is sent, which is kept free for it.
    Raises: GroupError if another process holds the port; ConfigError if the address is not of this host.
    """

    def __init__(self, place: LocalRanks, log: Log = output.say, *, serves: bool = True) -> None:
        self._listener = ports.listen(place.master_addr, place.master_port)
        self.place = replace(place, master_port=self._listener.getsockname()[1])
        self.server = GroupServer(self._listener, place.token, log)
        self.log, self._serves = log, serves
        self.ranks: Rendezvous | None = None  # of the start that is open
        self._of_start = ExitStack()  # ends the open start's service, or frees the port kept for it
        self._folder: str | None = None
        self.error: Exception | None = None  # that ends this host's launcher, and the job on all hosts
        # Loading jaxlib takes 0.1 s, which the ranks need anyway to start; they are started first. No daemon:
        # a process that ends while a thread loads native code may abort.
        self._load = threading.Timer(LOAD_AFTER_S, jax_private.can_serve)
        self._load.name = "cyxjax-load"
        if serves:
            # Otherwise its service logs every connection of every start on our standard error.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
            self._load.start()

    def open(self, start: int, folder: str | None = None) -> None:
        """Admits the ranks of the only start, where no launcher leads it. folder: as in `lead`."""
        self._folder = folder
        self.open_start(start, self.place.world_size)
        self.server.start()

    def lead(self, size: Size, max_restarts: int, folder: str | None = None) -> Channel:
        """Leads the launchers of a job of `size`. Returns: the connection of the one on this host.

        folder: closed to other users, for a socket.
        """
        self._folder = folder
        ours, theirs = socket.socketpair()  # needs no handshake
        hosts = self.server.hosts = Hosts(self, size, max_restarts)
        hosts.add(Member(socket.gethostname(), 0, self.place.nproc, self.server.add(ours, "this host")))
        self.server.start()
        return Channel(theirs)

    def wait_until_ranks_left(self, timeout_s: float) -> None:
        """Returns when every rank has left, or after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self.ranks is not None and self.ranks.here and time.monotonic() < end:
            time.sleep(0.02)

    def end(self) -> None:
        """Closes everything, the listener too. The ranks must have ended. A second call does no harm."""
        self._load.cancel()
        self.server.close()
        self.close_start()
        self._listener.close()

    def open_start(self, number: int, world_size: int) -> None:
        """Lets the ranks of start `number` join. Call it in the server's thread, or before that starts."""
        self.ranks = self.server.ranks = Rendezvous(
            world_size,
            partial(self._coordinate, number, world_size),
            self.server,
            self.log,
            run_id=self.place.run_id,
            generation=number,
            is_led=self.server.hosts is not None,
        )

    def close_start(self) -> None:
        """Ends the start's connections and service."""
        if self.ranks is not None:
            self.ranks.close()
        self._of_start.close()
        self.ranks = self.server.ranks = None

    def _coordinate(self, start: int, world_size: int) -> Message:
        """Starts the service once all ranks are here; where this jaxlib cannot, rank 0 must do it.

        jax authenticates none of its clients. Where all ranks are this process's children the service listens
        on a Unix socket in a folder that is closed to other users; else on the address of MASTER_ADDR alone.
        """
        served = self._serves and jax_private.can_serve()
        address = self._private_address(start) if served else None
        if address is None:
            reserved, port = ports.reserve(self.place.master_addr)
            self._of_start.callback(reserved.close)
            address = join_address(self.place.master_addr, port)
        if served:
            self._of_start.callback(jax_private.serve(address, world_size).shutdown)
        return {"address": address, "served": served}

    def _private_address(self, start: int) -> str | None:
        """A Unix socket that only this user reaches; None across hosts, or where its path is too long."""
        if self._folder is None or not self.place.is_alone:
            return None
        path = os.path.join(self._folder, f"start_{start}.jax")
        return f"unix:{path}" if len(path) < LONGEST_PATH else None


class Hosts:
    """The launchers of a job, led by the controller, whose orders are carried out here.

    Runs in the server's thread, which never waits to send: an order is small, and the kernel buffers it.
    """

    def __init__(self, first: Coordinator, size: Size, max_restarts: int) -> None:
        self._first, self._size = first, size
        self.log, self.open_start, self.close_start = first.log, first.open_start, first.close_start
        timeout_s, budget = first.place.timeout_ms / 1000, Budget(max_restarts)
        self.controller = Controller(size, timeout_s, budget, time.monotonic(), self)

    def welcome(self, peer: Peer, hello: Message) -> None:
        name = output.printable(hello["host"], 255)
        host = Member(name, int(hello["base_rank"]), int(hello["nproc"]), peer)
        if why := self._refusal(host, hello):
            self._first.server.refuse(peer, why)
            return
        self.add(host)

    def add(self, host: Member) -> None:
        """Adds `host` to the job."""
        host.peer.hear = partial(self._lead, self.controller.hear, host)
        host.peer.lost = partial(self._lead, self.controller.lose, host)
        self._lead(self.controller.join, host)

    def tick(self) -> None:
        self._lead(self.controller.act)

    def _lead(self, call: Callable[..., None], *args: Any) -> None:
        """Calls the controller. An error in it ends the job on all hosts, which would wait otherwise.

        Raises: KeyError, TypeError, ValueError, which are taken for an invalid message; the server drops its
            sender.
        """
        try:
            call(*args, time.monotonic())
        except (KeyError, TypeError, ValueError):
            raise
        except Exception:
            self.controller.finish(EXIT_INFRASTRUCTURE, traceback.format_exc())

    def close(self) -> None:
        """Ends the job for the hosts that are still here; the server then ends their connections."""
        code, why = EXIT_PREEMPTED, "the first host leaves, and the job ends with it"
        if (error := self._first.error) is not None:
            code, why = EXIT_INFRASTRUCTURE, f"the launcher of the first host failed: {describe(error)}"
        self.controller.finish(code, why)

    def send(self, host: Member, message: Message) -> None:
        host.peer.send(message)

    def drop(self, host: Member) -> None:
        self._first.server.drop(host.peer)

    def _refusal(self, host: Member, hello: Message) -> str:
        place, size = self._first.place, self._size
        if hello["run_id"] != place.run_id:
            return f"this port belongs to job {place.run_id!r}. HINT: give each job its own port."
        if hello["world_size"] != size.world_size:
            return (
                f"this host was started for WORLD_SIZE={hello['world_size']}, the first for "
                f"{size.world_size} (0: elastic). HINT: give each host the same flags."
            )
        least, most = (place.nproc, size.world_size - host.nproc) if size.is_fixed else (-1, -1)
        if host.nproc < 1 or not least <= host.base_rank <= most:
            return f"ranks from {host.base_rank} on are outside the job. HINT: check --node-rank there."
        return ""
