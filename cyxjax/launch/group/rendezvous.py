"""The ranks of one start: who joined, who is missing, where jax's coordinator is, who was lost.

Each rank keeps its connection to the server until it ends. Everything here runs in the server's thread.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cyxjax.launch.group.protocol import Message
from cyxjax.launch.group.server import GroupServer, Log, Peer
from cyxjax.launch.output import LINE_EVERY_S, printable, ranks_text, unequal_facts


@dataclass(frozen=True)
class Hello:
    """What a rank sends about itself when it joins. `facts` must be equal on all ranks (versions, config).

    timeout_s: how long it waits for the others; its program may have chosen another than the launcher's.
    """

    rank: int
    world_size: int
    run_id: str = ""
    generation: int = 0
    timeout_s: float = 30.0
    host: str = ""
    pid: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @classmethod
    def parse(cls, message: Message) -> "Hello":
        """The Hello in a message from the wire. Raises: KeyError, TypeError, ValueError for any other."""
        return cls(
            rank=int(message["rank"]),
            world_size=int(message["world_size"]),
            run_id=str(message["run_id"]),
            generation=int(message["generation"]),
            timeout_s=float(message["timeout_s"]),
            host=printable(message["host"], 255),
            pid=int(message["pid"]),
            facts=dict(message["facts"]),
        )


class Joined(NamedTuple):
    """A rank that has joined."""

    hello: Hello
    peer: Peer


class Rendezvous:
    """Admits the ranks of a start, sends them where jax's coordinator is, then which one was lost first.

    open_coordinator: called once when all are here; what it returns is sent to every rank.
    log: receives one line per event worth a person's attention. run_id, generation: of the job, and the
    number of the start. is_led: launchers start the ranks, so a rank of an earlier start is late.
    """

    def __init__(
        self,
        world_size: int,
        open_coordinator: Callable[[], Message],
        server: GroupServer,
        log: Log,
        *,
        run_id: str = "",
        generation: int = 0,
        is_led: bool = False,
    ) -> None:
        self.world_size, self._run_id = world_size, run_id
        self._generation, self._is_led = generation, is_led
        self.formed = False
        self.here: dict[int, Joined] = {}
        self._open, self._server, self._log = open_coordinator, server, log
        self._cannot_form = ""  # the reason, once a rank with a different WORLD_SIZE has come
        self._loss_sent = False
        self._num_done = 0
        self._began, self._next_line = time.monotonic(), LINE_EVERY_S

    def close(self) -> None:
        """Ends every rank's connection."""
        here, self.here = self.here, {}
        for rank in here.values():
            self._server.drop(rank.peer)

    def welcome(self, peer: Peer, hello: Message) -> None:
        rank = Hello.parse(hello)
        if why := self._refusal(rank):
            self._server.refuse(peer, why)
        elif self.formed or rank.generation > self._generation:  # it is of a start that has not begun here
            self._server.put_off(peer)
        else:
            self._admit(Joined(rank, peer))

    def tick(self) -> None:
        """Gives up after the longest timeout of the ranks that wait; logs which ranks are awaited."""
        limit_s = max((rank.hello.timeout_s for rank in self.here.values()), default=0.0)
        if self.formed or not self.here:
            self._began, self._next_line = time.monotonic(), LINE_EVERY_S
        elif (waited_s := time.monotonic() - self._began) > limit_s:
            self._abort(
                f"Timeout waiting for peers: {self._awaited(limit_s)}. HINT: see why those ranks "
                "did not start (their host's log), or raise DISTRIBUTED_TIMEOUT_MS."
            )
        elif waited_s > self._next_line:
            self._log(f"waiting for {self._awaited(self._next_line)}")
            self._next_line += LINE_EVERY_S

    def _awaited(self, waited_s: float) -> str:
        missing = [rank for rank in range(self.world_size) if rank not in self.here]
        return f"{ranks_text(missing)} after {waited_s:g} s; here: {ranks_text(self.here)}"

    def _refusal(self, hello: Hello) -> str:
        """Why `hello` may not join; "" if it may."""
        if hello.run_id != self._run_id:
            return (
                f"this port belongs to job {self._run_id or '(unnamed)'!r}, but {hello} is of job "
                f"{hello.run_id or '(unnamed)'!r}. HINT: give each job its own MASTER_PORT."
            )
        # Without launchers each host counts its restarts: a lower count (of a new host) is no error.
        if self._is_led and hello.generation < self._generation:
            return f"start {hello.generation} is over, this is start {self._generation}"
        if hello.world_size != self.world_size:
            why = (
                f"ranks differ in WORLD_SIZE: {hello.world_size} on rank {hello.rank}, {self.world_size} on "
                "the others. HINT: start every rank with the same program and environment."
            )
            if not self.formed:
                self._cannot_form = why
                self._abort(why)
            return why
        if not 0 <= hello.rank < self.world_size:
            return f"{hello} is outside WORLD_SIZE={self.world_size}. HINT: ranks are 0 to WORLD_SIZE - 1."
        if hello.rank in self.here:
            return (
                f"RANK={hello.rank} is taken: {self.here[hello.rank].hello} was here before {hello}. "
                "HINT: give every process its own RANK; the job continues unaffected."
            )
        return self._cannot_form

    def _admit(self, new: Joined) -> None:
        new.peer.hear, new.peer.lost = partial(self._hear, new), partial(self._lose, new)
        self.here[new.hello.rank] = new
        if len(self.here) < self.world_size:
            return
        facts = {rank: dict(sorted(self.here[rank].hello.facts.items())) for rank in sorted(self.here)}
        if why := next(unequal_facts(facts), ""):
            self._abort(why)
            return
        try:
            coordinator = self._open()
        except (OSError, RuntimeError) as error:  # jaxlib raises RuntimeError for a service that cannot start
            self._abort(
                f"jax's coordination service could not start: {error}. HINT: check that ports are free."
            )
            return
        self.formed = True
        self._send_all({"formed": coordinator})

    def _hear(self, rank: Joined, message: Message) -> None:
        if "done" in message:
            self._num_done += 1
            if self._num_done == self.world_size:
                self._send_all({"all_done": True})
        elif "error" in message:
            self._send_loss(rank.hello, str(message["error"]))
        elif "bye" in message:  # its connection ends a moment later
            self.here.pop(rank.hello.rank, None)

    def _lose(self, rank: Joined) -> None:
        if self.here.get(rank.hello.rank) is rank:  # it ended without announcing that it leaves
            del self.here[rank.hello.rank]
            if self.formed:
                self._send_loss(rank.hello, "its process ended or its host cannot be reached")

    def _send_loss(self, lost: Hello, why: str) -> None:
        """Sends only the first loss, which ends the group: the many that follow from it are not sent."""
        if not self._loss_sent:
            self._loss_sent = True
            self._send_all({"lost": lost.rank, "host": lost.host, "why": why})

    def _send_all(self, message: Message) -> None:
        for rank in self.here.values():
            rank.peer.send(message)

    def _abort(self, why: str) -> None:
        """Sends all joined ranks the reason, and starts over with the next client."""
        self._log(why)
        self._send_all({"abort": why})
        self.close()
