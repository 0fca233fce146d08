"""The meeting place: the one socket all ranks of a job come to before jax starts, and stay connected to.

It runs as a thread in the first host's supervisor, or in rank 0 where no supervisor is. Who may come in is
the door's affair (handshake.py).
"""

import socket
import time
from collections.abc import Callable
from functools import partial

from cyxjax.errors import CyxjaxError
from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.handshake import Handshake, PendingConnection
from cyxjax.launch.group.reactor import Log, Reactor
from cyxjax.launch.group.roster import Hello, Job, Roster, disagreement, ranks_text

LINE_EVERY_S = 10.0
ASLEEP_S = 5.0  # between two ticks: this process was suspended, and nobody could come meanwhile


class _Peer:
    """A rank of the job, by its standing connection. `left`: it has said why, or goodbye."""

    def __init__(self, guest: PendingConnection, hello: Hello) -> None:
        self.guest, self.hello = guest, hello
        self.left = False


class RendezvousServer:
    """Admits the ranks of `job` on `listener`, tells them where jax's coordinator is, then keeps watch.

    open_coordinator: called once when all are here; what it returns is sent to every rank.
    log: receives one line per event worth a person's attention.
    """

    def __init__(
        self,
        listener: socket.socket,
        job: Job,
        open_coordinator: Callable[[Roster], protocol.Message],
        log: Log = print,
    ) -> None:
        self.job = job
        self.roster = Roster(job)
        self.formed = False
        self._open, self._log = open_coordinator, log
        self._handshake = Handshake(listener, job.token, self._welcome, log)
        self._reactor = Reactor("cyxjax-meeting", self._keep_time, self._end, log)
        self._peers: dict[_Peer, None] = {}  # a look-up for each of thousands of ranks
        self._told_lost = False
        self._first_at: float | None = None
        self._ticked_at = time.monotonic()
        self._next_line = LINE_EVERY_S
        self._finished: set[int] = set()
        self._odd_one: Hello | None = None  # a rank of this job that believes in another WORLD_SIZE

    def start(self) -> "RendezvousServer":
        self._handshake.open(self._reactor)
        self._reactor.start()
        return self

    def close(self) -> None:
        """Ends the thread and every connection; the listener stays open for the next generation.

        Twice is harmless.
        """
        self._reactor.close()

    def wait_until_empty(self, timeout_s: float) -> None:
        """Returns when every rank has left, or after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._peers:
            time.sleep(0.02)

    # -- the thread ---------------------------------------------------------------------------------

    def _end(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self._handshake.close()

    def _welcome(self, guest: PendingConnection, message: protocol.Message) -> None:
        try:
            hello = Hello.parse(message)
        except CyxjaxError as error:
            self._handshake.refuse(guest, str(error))
            return
        if self._is_early(hello):
            guest.send({"later": True})
            self._handshake.drop(guest)
        elif why := self.roster.refusal(hello):
            self._handshake.refuse(guest, why, f"refused {hello}: {why}")
            same_job = hello.run_id == self.job.run_id
            if same_job and hello.world_size != self.job.world_size and not self.formed:
                self._odd_one = hello
                self._abort_if_sizes_differ()
        else:
            self._admit(_Peer(guest, hello))

    def _read(self, peer: _Peer) -> None:
        try:
            is_open = peer.guest.receive()
            self._hear_all(peer)
        except protocol.BadMessage:
            is_open = False
        if not is_open:
            self._drop(peer)

    def _hear_all(self, peer: _Peer) -> None:
        while (message := peer.guest.codec.next()) is not None:
            self._hear(peer, message)

    def _is_early(self, hello: Hello) -> bool:
        """True for a rank of a restart that has not begun on this host: it is to knock again.

        Hosts count their restarts for themselves, so fewer of them (a host that was replaced) is no fault.
        """
        if hello.generation > self.job.generation:
            return True
        if not self.formed or hello.rank not in self.roster.present:
            return False
        return all(peer.hello.rank != hello.rank for peer in self._peers)

    def _abort_if_sizes_differ(self) -> bool:
        """Ends a formation that cannot succeed; whoever comes after the odd one is told as well."""
        odd = self._odd_one
        if odd is None or not self.roster.present:
            return False
        sizes = dict.fromkeys(self.roster.present, self.job.world_size) | {odd.rank: odd.world_size}
        self._abort(disagreement("WORLD_SIZE", sizes))
        return True

    def _admit(self, peer: _Peer) -> None:
        connection = peer.guest.socket
        ports.keep_alive(connection)
        self._peers[peer] = None
        self._reactor.add(connection, partial(self._read, peer), partial(self._drop, peer))
        self._first_at = self._first_at or time.monotonic()
        self.roster.add(peer.hello)
        if self._abort_if_sizes_differ():
            return
        self._hear_all(peer)
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
        self._tell_all({"formed": coordinator})

    def _hear(self, peer: _Peer, message: protocol.Message) -> None:
        if "done" in message:
            self._finished.add(peer.hello.rank)
            self._next_line = time.monotonic() + LINE_EVERY_S
            if len(self._finished) == self.job.world_size:
                self._tell_all({"all_done": True})
        elif "error" in message:
            peer.left = True
            self._tell_lost(peer.hello, protocol.printable(message["error"]))
        elif "bye" in message:
            peer.left = True

    def _keep_time(self) -> None:
        now = time.monotonic()
        asleep_s, self._ticked_at = now - self._ticked_at, now
        if asleep_s > ASLEEP_S and self._first_at is not None:
            self._first_at += asleep_s
        self._handshake.tick()
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

    def _tell_all(self, message: protocol.Message) -> None:
        for peer in self._peers:
            peer.guest.send(message)  # one that does not read is noticed by its end

    def _tell_lost(self, hello: Hello, why: str) -> None:
        """The first loss ends the group: those that follow from it, which are many, need not be told."""
        if self._told_lost:
            return
        self._told_lost = True
        for peer in self._peers:
            if peer.hello.rank != hello.rank:
                peer.guest.send({"lost": hello.rank, "host": hello.host, "why": why})

    def _abort(self, why: str) -> None:
        """Tells everyone who is here why the group cannot form, and starts afresh for whoever comes next."""
        self._log(why)
        self._tell_all({"abort": why})
        peers, self._peers = self._peers, {}
        for peer in peers:
            self._handshake.drop(peer.guest)
        self.roster, self._first_at, self._next_line = Roster(self.job), None, LINE_EVERY_S

    def _drop(self, peer: _Peer) -> None:
        """Ends the connection. Twice is harmless: by an abort, and by its own end."""
        self._handshake.drop(peer.guest)
        if peer not in self._peers:
            return
        del self._peers[peer]
        if self._reactor.closing:
            return
        if self.formed and not peer.left:
            self._tell_lost(peer.hello, "its process ended or its host cannot be reached")
        elif not self.formed:
            self.roster.remove(peer.hello.rank)
