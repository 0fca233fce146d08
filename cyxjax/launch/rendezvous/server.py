"""The meeting place: the one socket all ranks of a job come to before jax starts, and stay connected to.

It runs as a thread in the first host's supervisor, or in rank 0 where no supervisor is. Strangers get
nothing from it: they have five seconds and 16 kB to prove that they know the job's token.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from cyxjax.errors import CyxjaxError
from cyxjax.launch.rendezvous import ports, protocol
from cyxjax.launch.rendezvous.roster import Hello, Job, Roster, disagreement, ranks_text

STRANGER_S = 5.0  # time to say hello
MAX_STRANGERS = 128  # at once; the oldest goes when another knocks
LINE_EVERY_S = 10.0

Log = Callable[[str], None]


@dataclass(eq=False)
class _Peer:
    socket: socket.socket
    address: str
    nonce: str = field(default_factory=protocol.new_nonce)
    since: float = field(default_factory=time.monotonic)
    lines: protocol.Lines = field(default_factory=protocol.Lines)
    hello: Hello | None = None
    left: bool = False


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
        self._listener, self._open, self._log = listener, open_coordinator, log
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._closing = False
        self._first_at: float | None = None
        self._next_line = LINE_EVERY_S
        self._finished: set[int] = set()
        self._odd_one: Hello | None = None  # a rank of this job that believes in another WORLD_SIZE
        self._thread = threading.Thread(target=self._run, name="cyxjax-meeting", daemon=True)

    def start(self) -> "RendezvousServer":
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread and every connection; the listener stays open for the next generation.

        Twice is harmless.
        """
        self._closing = True
        with suppress(OSError):  # closed before
            self._wake_in.send(b"x")
        self._thread.join(timeout=5)
        # Not by the thread, which may see `_closing` and be gone before the byte is sent.
        self._wake_in.close()
        self._wake_out.close()

    def wait_until_empty(self, timeout_s: float) -> None:
        """Returns when every rank has left, or after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and any(peer.hello is not None for peer in self._peers()):
            time.sleep(0.02)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=0.5):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._wake_out:
                    self._read(key.data)
            self._keep_time()
        for peer in self._peers():
            self._drop(peer)
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except OSError:  # the knocker gave up first
            return
        strangers = [peer for peer in self._peers() if peer.hello is None]
        if len(strangers) >= MAX_STRANGERS:
            self._drop(min(strangers, key=lambda peer: peer.since))
        connection.setblocking(False)
        peer = _Peer(connection, str(where[0]))
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, {"cyxjax": protocol.PROTOCOL, "nonce": peer.nonce})

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(protocol.MAX_LINE)
            messages = peer.lines.feed(data)
        except BlockingIOError:
            return
        except (OSError, protocol.BadMessage):
            data, messages = b"", []
        for message in messages:
            if peer.hello is None:
                self._greet(peer, message)
            else:
                self._hear(peer, peer.hello, message)
        if not data:
            self._drop(peer)

    def _greet(self, peer: _Peer, message: protocol.Message) -> None:
        if not protocol.verify(self.job.token, peer.nonce, message):
            self._log(f"refused a connection from {peer.address}: wrong or missing job token")
            self._refuse(
                peer, "wrong or missing job token. HINT: set CYXJAX_TOKEN alike on every host of the job."
            )
            return
        try:
            hello = Hello.parse(message)
        except CyxjaxError as error:
            self._refuse(peer, str(error))
            return
        if self._is_early(hello):
            self._send(peer, {"later": True})
            self._drop(peer)
        elif why := self.roster.refusal(hello):
            self._log(f"refused {hello}: {why}")
            self._refuse(peer, why)
            same_job = hello.run_id == self.job.run_id
            if same_job and hello.world_size != self.job.world_size and not self.formed:
                self._odd_one = hello
                self._abort_if_sizes_differ()
        else:
            self._admit(peer, hello)

    def _is_early(self, hello: Hello) -> bool:
        """True for a rank of a restart that has not begun on this host: it is to knock again.

        Hosts count their restarts for themselves, so fewer of them (a host that was replaced) is no fault.
        """
        if hello.generation > self.job.generation:
            return True
        connected = {peer.hello.rank for peer in self._peers() if peer.hello is not None}
        return self.formed and hello.rank in self.roster.present and hello.rank not in connected

    def _abort_if_sizes_differ(self) -> bool:
        """Ends a formation that cannot succeed; whoever comes after the odd one is told as well."""
        odd = self._odd_one
        if odd is None or not self.roster.present:
            return False
        sizes = dict.fromkeys(self.roster.present, self.job.world_size) | {odd.rank: odd.world_size}
        self._abort(disagreement("WORLD_SIZE", sizes))
        return True

    def _admit(self, peer: _Peer, hello: Hello) -> None:
        peer.hello = hello
        ports.keep_alive(peer.socket)
        self._first_at = self._first_at or time.monotonic()
        self.roster.add(hello)
        if self._abort_if_sizes_differ() or not self.roster.complete:
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

    def _hear(self, peer: _Peer, hello: Hello, message: protocol.Message) -> None:
        if "done" in message:
            self._finished.add(hello.rank)
            self._next_line = time.monotonic() + LINE_EVERY_S
            if len(self._finished) == self.job.world_size:
                self._tell_all({"all_done": True})
        elif "error" in message:
            peer.left = True
            self._tell_lost(hello, str(message["error"])[:2000])
        elif "bye" in message:
            peer.left = True

    def _keep_time(self) -> None:
        now = time.monotonic()
        for peer in self._peers():
            if peer.hello is None and now - peer.since > STRANGER_S:
                self._drop(peer)
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

    def _peers(self) -> list[_Peer]:
        return [key.data for key in list(self._selector.get_map().values()) if isinstance(key.data, _Peer)]

    def _send(self, peer: _Peer, message: protocol.Message) -> None:
        try:
            peer.socket.send(protocol.encode(message))
        except OSError:  # gone, or not reading: its end is noticed by the next read
            peer.since = -STRANGER_S

    def _tell_all(self, message: protocol.Message) -> None:
        for peer in self._peers():
            if peer.hello is not None:
                self._send(peer, message)

    def _tell_lost(self, hello: Hello, why: str) -> None:
        for peer in self._peers():
            if peer.hello is not None and peer.hello.rank != hello.rank:
                self._send(peer, {"lost": hello.rank, "host": hello.host, "why": why})

    def _abort(self, why: str) -> None:
        """Tells everyone who is here why the group cannot form, and starts afresh for whoever comes next."""
        self._log(why)
        self._tell_all({"abort": why})
        for peer in self._peers():
            if peer.hello is not None:
                peer.hello = None
                self._drop(peer)
        self.roster, self._first_at, self._next_line = Roster(self.job), None, LINE_EVERY_S

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._send(peer, {"refused": why})
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        hello, peer.hello = peer.hello, None
        with suppress(KeyError, ValueError):  # dropped twice: by an abort and by its own end
            self._selector.unregister(peer.socket)
        peer.socket.close()
        if hello is None or self._closing:
            return
        if self.formed and not peer.left:
            self._tell_lost(hello, "its process ended or its host cannot be reached")
        elif not self.formed:
            self.roster.remove(hello.rank)
