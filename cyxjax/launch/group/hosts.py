"""The launchers of a job, led by the controller: its orders are carried out here, in the server's thread."""

import socket
import time
import traceback
from collections.abc import Callable
from functools import partial

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.controller import CloseStart, Controller, Event, Log, OpenStart, Order, Send, Size
from cyxjax.launch.group.group_start import Budget, Member
from cyxjax.launch.group.handshake import Handshake, PendingConnection
from cyxjax.launch.group.ports import Log as Say
from cyxjax.launch.group.ports import Reactor
from cyxjax.launch.local_ranks import LocalRanks

MAX_RANKS = 65_536  # on one host


class Hosts:
    """The launchers of the job of `place`, from the first host's side.

    open_start(number, world_size), close_start(): let the ranks of a start join, and end that.
    Connections of hosts send as they wait: an order is small, and the kernel holds it.
    """

    def __init__(
        self,
        place: LocalRanks,
        size: Size,
        max_restarts: int,
        open_start: Callable[[int, int], None],
        close_start: Callable[[], None],
        reactor: Reactor,
        handshake: Handshake,
        log: Say,
    ) -> None:
        self._place, self._size = place, size
        self._open_start, self._close_start = open_start, close_start
        self._reactor, self._handshake, self._log = reactor, handshake, log
        self._connections: dict[Member, PendingConnection] = {}
        now, timeout_s = time.monotonic(), place.timeout_ms / 1000
        self.controller = Controller(size, timeout_s, Budget(max_restarts), now)

    def connect(self) -> protocol.Channel:
        """The first host's own connection, which needs no handshake; before the server's thread runs."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = PendingConnection(ours, "this host")
        self._add(Member(socket.gethostname(), 0, self._place.nproc), connection)
        return protocol.Channel(theirs)

    def welcome(self, connection: PendingConnection, hello: protocol.Message) -> None:
        if why := self._refusal(hello):
            self._handshake.refuse(connection, why, f"refused a host at {connection.address}: {why}")
            return
        ports.keep_alive(connection.socket)
        host = protocol.printable(hello["host"], 255)
        self._add(Member(host, hello["base_rank"], hello["nproc"]), connection)

    def tick(self) -> None:
        """Lets the controller act on the time."""
        if self.controller.wake_at <= time.monotonic():
            self._handle()

    def close(self) -> None:
        """Ends the job for the hosts that are still here, and their connections."""
        self._carry_out(
            self.controller.finish(EXIT_PREEMPTED, "the first host leaves, and the job ends with it")
        )
        for connection in self._connections.values():
            self._handshake.drop(connection)

    def _add(self, host: Member, connection: PendingConnection) -> None:
        read, lose = partial(self._read, host, connection), partial(self._lose, host)
        self._reactor.add(connection.socket, read, lose)
        self._connections[host] = connection
        self._handle(Event(host, "joined"))
        self._read(host, connection)

    def _read(self, host: Member, connection: PendingConnection) -> None:
        try:
            is_open = connection.receive()
            while (message := connection.codec.next()) is not None:
                self._handle(Event(host, "message", message))
        except protocol.BadMessage:
            is_open = False
        if not is_open:
            self._lose(host)

    def _lose(self, host: Member) -> None:
        if (connection := self._connections.pop(host, None)) is not None:
            self._handshake.drop(connection)
            self._handle(Event(host, "lost"))

    def _handle(self, event: Event | None = None) -> None:
        try:
            self._carry_out(self.controller.handle(time.monotonic(), event))
        except Exception:  # a fault of ours: no host may wait for ever
            why = f"the first host cannot go on:\n{traceback.format_exc()}"
            self._carry_out(self.controller.finish(EXIT_INFRASTRUCTURE, why))

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Send(host, message) if host in self._connections:
                    self._connections[host].send(message)  # one that does not read is noticed by its end
                case Log(line):
                    self._log(line)
                case OpenStart(number, world_size):
                    self._open_start(number, world_size)
                case CloseStart():
                    self._close_start()

    def _refusal(self, hello: protocol.Message) -> str:
        if hello.get("run_id") != self._place.run_id:
            return f"this port belongs to job {self._place.run_id!r}. HINT: give each job its own port."
        nproc, base, host = hello.get("nproc"), hello.get("base_rank"), hello.get("host")
        if type(nproc) is not int or not 0 < nproc <= MAX_RANKS or not isinstance(host, str):
            return "a host without a name or ranks. HINT: use one version of cyxjax."
        if hello.get("world_size") != self._size.world_size:
            given, ours = hello.get("world_size"), self._size.world_size
            return (
                f"this host was started for WORLD_SIZE={given}, the first host for {ours} (0: elastic). "
                "HINT: give --nnodes and --nproc-per-node alike on every host."
            )
        least, most = (self._place.nproc, self._size.world_size - nproc) if self._size.is_fixed else (-1, -1)
        if type(base) is not int or not least <= base <= most:
            return f"ranks from {base} on are outside the job. HINT: check --node-rank on this host."
        return ""
