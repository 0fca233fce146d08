"""The ranks of one start: who joined, who is missing, where jax's coordinator is, who was lost.

Each rank keeps its connection to the server until it ends. Everything here runs in the server's thread.
"""

import time
from collections.abc import Callable
from functools import partial

from cyxjax.errors import CyxjaxError
from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.handshake import Handshake, PendingConnection
from cyxjax.launch.group.ports import Log, Reactor
from cyxjax.launch.group.roster import Hello, Job, Roster, disagreement, ranks_text

LINE_EVERY_S = 10.0
ASLEEP_S = 5.0  # between two ticks: this process was suspended, and nobody could join meanwhile


class _Peer:
    """A rank of the job. `left`: it has sent why it ends, or goodbye."""

    def __init__(self, connection: PendingConnection, hello: Hello) -> None:
        self.connection, self.hello = connection, hello
        self.left = False


class Rendezvous:
    """Admits the ranks of `job`, sends them where jax's coordinator is, then which one was lost first.

    open_coordinator: called once when all are here; what it returns is sent to every rank.
    log: receives one line per event worth a person's attention.
    """

    def __init__(
        self,
        job: Job,
        open_coordinator: Callable[[Roster], protocol.Message],
        reactor: Reactor,
        handshake: Handshake,
        log: Log,
    ) -> None:
        self.job = job
        self.roster = Roster(job)
        self.formed = False
        self._open, self._log = open_coordinator, log
        self._reactor, self._handshake = reactor, handshake
        self.peers: dict[_Peer, None] = {}  # a look-up for each of thousands of ranks
        self._loss_sent = False
        self._closing = False
        self._first_at: float | None = None
        self._ticked_at = time.monotonic()
        self._next_line = LINE_EVERY_S
        self._finished: set[int] = set()
        self._odd_one: Hello | None = None  # a rank of this job that believes in another WORLD_SIZE

    def close(self) -> None:
        """Ends every rank's connection."""
        self._closing = True
        for peer in list(self.peers):
            self._drop(peer)

    def welcome(self, connection: PendingConnection, message: protocol.Message) -> None:
        try:
            hello = Hello.parse(message)
        except CyxjaxError as error:
            self._handshake.refuse(connection, str(error))
            return
        if self.job.is_led and hello.generation < self.job.generation:
            late = f"start {hello.generation} is over, this is start {self.job.generation}"
            self._handshake.refuse(connection, late, f"refused {hello}: {late}")
        elif self._is_early(hello):
            connection.send({"later": True})
            self._handshake.drop(connection)
        elif why := self.roster.refusal(hello):
            self._handshake.refuse(connection, why, f"refused {hello}: {why}")
            same_job = hello.run_id == self.job.run_id
            if same_job and hello.world_size != self.job.world_size and not self.formed:
                self._odd_one = hello
                self._abort_if_sizes_differ()
        else:
            self._admit(_Peer(connection, hello))

    def _read(self, peer: _Peer) -> None:
        try:
            is_open = peer.connection.receive()
            while (message := peer.connection.codec.next()) is not None:
                self._hear(peer, message)
        except protocol.BadMessage:
            is_open = False
        if not is_open:
            self._drop(peer)

    def _is_early(self, hello: Hello) -> bool:
        """True for a rank of a restart that has not begun here: it is to try again.

        Without launchers hosts count restarts for themselves: fewer of them (a host replaced) are no fault.
        """
        if hello.generation > self.job.generation:
            return True
        if not self.formed or hello.rank not in self.roster.present:
            return False
        return all(peer.hello.rank != hello.rank for peer in self.peers)

    def _abort_if_sizes_differ(self) -> bool:
        """Ends a formation that cannot succeed; whoever joins later gets the same answer."""
        odd = self._odd_one
        if odd is None or not self.roster.present:
            return False
        sizes = dict.fromkeys(self.roster.present, self.job.world_size) | {odd.rank: odd.world_size}
        self._abort(disagreement("WORLD_SIZE", sizes))
        return True

    def _admit(self, peer: _Peer) -> None:
        ports.keep_alive(peer.connection.socket)
        self.peers[peer] = None
        self._reactor.add(peer.connection.socket, partial(self._read, peer), partial(self._drop, peer))
        self._first_at = self._first_at or time.monotonic()
        self.roster.add(peer.hello)
        if self._abort_if_sizes_differ():
            return
        self._read(peer)  # what came with its hello
        if not self.roster.complete:
            return
        if why := self.roster.differing_fact():
            self._abort(why)
        else:
            self._form()

    def _form(self) -> None:
        try:
            coordinator = self._open(self.roster)
        except (OSError, RuntimeError) as error:  # jaxlib raises RuntimeError for a service that cannot start
            self._abort(
                f"jax's coordination service could not start: {error}. HINT: see whether ports are free."
            )
            return
        self.formed = True
        self._send_all({"formed": coordinator})

    def _hear(self, peer: _Peer, message: protocol.Message) -> None:
        if "done" in message:
            self._finished.add(peer.hello.rank)
            self._next_line = time.monotonic() + LINE_EVERY_S
            if len(self._finished) == self.job.world_size:
                self._send_all({"all_done": True})
        elif "error" in message:
            peer.left = True
            self._send_loss(peer.hello, protocol.printable(message["error"]))
        elif "bye" in message:
            peer.left = True

    def tick(self) -> None:
        now = time.monotonic()
        asleep_s, self._ticked_at = now - self._ticked_at, now
        if asleep_s > ASLEEP_S and self._first_at is not None:
            self._first_at += asleep_s
        if self.formed:
            self._say_who_finished(now)
        elif self._first_at is not None:
            self._say_who_is_awaited(now - self._first_at)

    def _say_who_is_awaited(self, waited_s: float) -> None:
        if waited_s > self.job.timeout_s:
            self._abort(
                f"Timeout waiting for peers: {self.roster.awaited()} after {self.job.timeout_s:g} s; here: "
                f"{self.roster.here()}. HINT: see why those ranks did not start (their host's log), or raise "
                "DISTRIBUTED_TIMEOUT_MS."
            )
        elif waited_s > self._next_line:
            self._next_line += LINE_EVERY_S
            self._log(f"waiting for {self.roster.awaited()} for {waited_s:.0f} s; here: {self.roster.here()}")

    def _say_who_finished(self, now: float) -> None:
        awaited = [rank for rank in self.roster.present if rank not in self._finished]
        if self._finished and awaited and now > self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._log(f"finished: {ranks_text(sorted(self._finished))}; still awaited: {ranks_text(awaited)}")

    # -- sending and dropping -----------------------------------------------------------------------

    def _send_all(self, message: protocol.Message) -> None:
        for peer in self.peers:
            peer.connection.send(message)  # one that does not read is noticed by its end

    def _send_loss(self, hello: Hello, why: str) -> None:
        """The first loss ends the group: those that follow from it, which are many, need not be sent."""
        if self._loss_sent:
            return
        self._loss_sent = True
        for peer in self.peers:
            if peer.hello.rank != hello.rank:
                peer.connection.send({"lost": hello.rank, "host": hello.host, "why": why})

    def _abort(self, why: str) -> None:
        """Sends all who are here why the group cannot form, and starts over with the next client."""
        self._log(why)
        self._send_all({"abort": why})
        peers, self.peers = self.peers, {}
        for peer in peers:
            self._handshake.drop(peer.connection)
        self.roster, self._first_at, self._next_line = Roster(self.job), None, LINE_EVERY_S

    def _drop(self, peer: _Peer) -> None:
        """Ends the connection. Twice is harmless: by an abort, and by its own end."""
        self._handshake.drop(peer.connection)
        if peer not in self.peers:
            return
        del self.peers[peer]
        if self._closing:
            return
        if self.formed and not peer.left:
            self._send_loss(peer.hello, "its process ended or its host cannot be reached")
        elif not self.formed:
            self.roster.remove(peer.hello.rank)
