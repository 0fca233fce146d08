"""The policy of a job: which hosts take part in a start of the ranks, when it ends and what follows.

A pure state machine: its inputs are what happens to hosts and the time, its outputs are orders. Sockets,
threads and the clock belong to the caller (coordinator.py), so that the same code leads simulated hosts
(scripts/bench/simulate.py).

A job of fixed size has equal bounds on its hosts: it waits for all its ranks. A host that joins or leaves
changes the size of an elastic job and uses up no restart. A fixed job cannot continue without a host: a lost
host is a failure, which may be answered by a restart, and a host that is asked to stop ends the job.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED
from cyxjax.launch.group.group_start import Budget, GroupStart, Member, describe
from cyxjax.launch.group.protocol import Message
from cyxjax.launch.output import LINE_EVERY_S, NAMED, ranks_text

LAST_CALL_S = 2.0  # after a host joined: time for others to join with it
ANSWER_S = 60.0  # from the order to end immediately; a host that is suspended, or hangs, does not follow it
ASKED = "a host was asked to stop, and the job ends with it"


class Orders(Protocol):
    """The calls with which a controller gives its orders."""

    def send(self, host: Member, message: Message) -> None:
        """Sends `message` to `host`."""

    def drop(self, host: Member) -> None:
        """Ends the connection of `host`; the caller then learns that it is lost."""

    def log(self, line: str) -> None:
        """Shows `line` to the person who watches the first host."""

    def open_start(self, number: int, world_size: int) -> None:
        """Lets the `world_size` ranks of start `number` join from now on."""

    def close_start(self) -> None:
        """Called when all ranks of the last start have ended."""


@dataclass(frozen=True)
class Size:
    """How many hosts a job has: `low` to `high`, or those of exactly `world_size` ranks if it is given."""

    low: int = 1
    high: int = 1
    world_size: int = 0

    @property
    def is_fixed(self) -> bool:
        return self.world_size > 0

    def is_enough(self, num_hosts: int, num_ranks: int) -> bool:
        return num_ranks >= self.world_size if self.is_fixed else num_hosts >= self.low

    def is_most(self, num_hosts: int) -> bool:
        return self.is_fixed or num_hosts >= self.high

    def choose(self, hosts: Iterable[Member]) -> list[Member]:
        """The hosts of the next start in the order of their ranks; [] where some ranks are missing.

        Elastic: the first host, then the others as they joined. Fixed: each host at the ranks it was given.
        """
        if not self.is_fixed:
            chosen = sorted(hosts, key=lambda host: not host.is_first)[: self.high]
            return chosen if chosen and chosen[0].is_first else []
        at = {host.base_rank: host for host in reversed(list(hosts))}
        chosen, base = [], 0
        while base in at:
            chosen.append(at[base])
            base += at[base].nproc
        return chosen if base == self.world_size else []


class Controller:
    """Leads start after start of a job of `size`.

    timeout_s: how long the job waits for enough hosts. end: the message that was sent to all hosts when the
    job was over, with the exit code of each; None before.
    """

    def __init__(self, size: Size, timeout_s: float, budget: Budget, now: float, orders: Orders) -> None:
        self.size, self._timeout_s, self._budget, self._orders = size, timeout_s, budget, orders
        self.hosts: dict[Member, None] = {}  # in the order in which they joined
        self.end: Message | None = None
        self._number = 0
        self._start: GroupStart | None = None
        self._num_ranks = 0  # of all hosts
        self._wait(now)

    def join(self, host: Member, now: float) -> None:
        """A host has joined."""
        self.hosts[host] = None
        self._num_ranks += host.nproc
        self._settled = now + LAST_CALL_S
        current = self._start
        if current is not None and self.size.is_most(current.num_hosts):
            self._tell_spare(host)
        elif current is not None and not current.changed:
            current.changed = f"host {host.host} has joined"
            why = f"{current.changed}: the group saves and restarts with it"
            self._orders.log(why)
            self._ask_to_end(current, why)
        self.act(now)

    def lose(self, host: Member, now: float) -> None:
        """A host is gone. The others cannot continue: their collectives wait for its ranks."""
        self._forget(host)
        current = self._start
        if current is not None and host in current.running:
            current.note_loss(host)
            if current.num_hosts:  # a host that was alone knows why it ends
                self._orders.log(current.changed)
            self._end_at_once(current, current.changed, now)
        self.act(now)

    def hear(self, host: Member, message: Message, now: float) -> None:
        """Handles a host's message: how the start's ranks ended there (end_message), or that it leaves."""
        current = self._start
        # Before its ranks have begun (step -1) the others wait for them; later all ranks stop at one step.
        is_awaited = current is not None and host in current.running and message.get("step") == -1
        if current is not None and message.get("ended") == current.number and host in current.running:
            current.note_end(host, message, now)
        if message.get("how") == "left":  # its connection ends a moment later
            self._leave(host, is_awaited, now)
        self.act(now)

    def act(self, now: float) -> None:
        """Does what is due at `now`; to be called from time to time."""
        if self.end is not None:
            return
        current = self._start
        if current is not None:
            if now >= current.follow_by:  # ends the hosts that have not noticed a failure elsewhere
                assert current.failure is not None
                current.follow_by = math.inf
                self._end_at_once(current, describe(current.failure), now)
            if now >= current.answer_by:
                self._give_up(current)
                return
            if current.running:
                return
            self._start = None
            self._orders.close_start()
            self._number += 1
            self._wait(now)
            self._decide(current, now)
        if self.end is None and now >= self._began:
            self._gather(now)

    def finish(self, code: int, why: str = "") -> None:
        """Sends the end of the job to every host; to the first host last, since its launcher then ends."""
        if self.end is None:
            self.end = {"over": code, "why": why}
            for host in sorted(self.hosts, key=lambda host: host.is_first):
                self._orders.send(host, self.end)

    # -- between starts -------------------------------------------------------------------------------

    def _wait(self, began: float) -> None:
        """From `began` on, hosts are gathered for the next start."""
        self._began, self._settled = began, began + LAST_CALL_S
        self._next_line, self._late = began + LINE_EVERY_S, began + self._timeout_s

    def _gather(self, now: float) -> None:
        """Begins a start when enough hosts are here; ends the job when they are too late."""
        num_hosts, members = len(self.hosts), list[Member]()
        if self.size.is_enough(num_hosts, self._num_ranks) and (
            self.size.is_most(num_hosts) or now >= self._settled
        ):
            members = self.size.choose(self.hosts)
        if members:
            self._begin(members)
        elif now >= self._late:
            lower = "" if self.size.is_fixed else ", or lower MIN in --nnodes MIN:MAX"
            self.finish(
                EXIT_INFRASTRUCTURE,
                f"Timeout waiting for hosts: {self._awaited()}, after {self._timeout_s:g} s. HINT: check "
                f"why the others did not start, or raise DISTRIBUTED_TIMEOUT_MS{lower}.",
            )
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._orders.log(f"waiting for hosts: {self._awaited()}")

    def _begin(self, members: list[Member]) -> None:
        self._start = GroupStart(self._number, dict.fromkeys(members))
        for spare in self.hosts:
            if spare not in self._start.running:
                self._tell_spare(spare)
        world_size = sum(host.nproc for host in members)
        self._orders.open_start(self._number, world_size)
        if not self.size.is_fixed or len(members) > 1:
            what = f"{len(members)} host(s), {world_size} rank(s)"
            self._orders.log(f"start {self._number}: {what}: {_names(members)}")
        base_rank = 0
        for host in members:
            call = {"start": self._number, "base_rank": base_rank, "world_size": world_size}
            self._orders.send(host, call)
            base_rank += host.nproc

    def _forget(self, host: Member) -> None:
        if host in self.hosts:
            del self.hosts[host]
            self._num_ranks -= host.nproc

    def _leave(self, host: Member, is_awaited: bool, now: float) -> None:
        """Ends a start that waits for `host`, and a fixed job that has no other host for its ranks."""
        self._forget(host)
        if self._start is not None:
            self._start.note_leaving(host)
            if is_awaited:
                self._end_at_once(self._start, f"host {host.host} was asked to stop", now)
        elif self.size.is_fixed and all(other.base_rank != host.base_rank for other in self.hosts):
            self.finish(EXIT_PREEMPTED, ASKED)

    def _end_at_once(self, current: GroupStart, why: str, now: float) -> None:
        """Ends the ranks of all hosts that still run."""
        if not current.ordered:  # a rack that fails is many losses: one order to the others is enough
            self._ask_to_end(current, why, polite=False)
            current.ordered, current.answer_by = True, now + ANSWER_S

    def _ask_to_end(self, current: GroupStart, why: str, *, polite: bool = True) -> None:
        if current.ordered:
            return
        for host in current.running:
            reason = {} if host.is_first else {"say": why}  # the first host has logged it
            self._orders.send(host, {"end": current.number, "polite": polite, **reason})

    def _give_up(self, current: GroupStart) -> None:
        """Drops hosts that do not end their ranks. The first host is waited for: the job ends with it."""
        current.answer_by = math.inf
        for host in [host for host in current.running if not host.is_first]:
            self._orders.log(f"host {host.host} did not end its ranks within {ANSWER_S:g} s and is given up")
            self._orders.drop(host)

    # -- what follows ---------------------------------------------------------------------------------

    def _decide(self, done: GroupStart, now: float) -> None:
        """What follows a start: the end of the job, or another start when the delay of a restart is over."""
        hows, failure = set(done.ended.values()), done.failure
        asked = "left" in hows
        has_error = failure is not None and not failure.secondary
        if hows == {"ok"} and not done.lost:
            self.finish(EXIT_OK)
        elif not self.size.is_fixed and (done.lost or ((done.changed or asked) and not has_error)):
            return
        elif "interrupted" in hows and not has_error:
            self.finish(EXIT_INTERRUPT, "a rank was interrupted, and the job ends with it")
        elif failure is None or (asked and not has_error):
            self.finish(EXIT_PREEMPTED, ASKED if asked else "")
        else:
            decision = self._budget.decide(failure, done.step, asked_to_end=asked and self.size.is_fixed)
            alone = done.num_hosts + len(done.lost) == 1
            line = decision.line if alone else f"{describe(failure)}; {decision.line}"
            for host in self.hosts:
                self._orders.send(host, {"decided": line})
            if not decision.again:
                self.finish(decision.exit_code)
            self._wait(now + decision.delay_s)

    # -- words ----------------------------------------------------------------------------------------

    def _tell_spare(self, host: Member) -> None:
        self._orders.send(host, {"say": "all places are taken: this host waits until another one leaves"})

    def _awaited(self) -> str:
        here = f"{len(self.hosts)} here ({_names(self.hosts) or 'none'})"
        if not self.size.is_fixed:
            return f"{here}, at least {self.size.low} are needed"
        missing = set(range(self.size.world_size))
        for host in self.hosts:
            missing -= set(range(host.base_rank, host.base_rank + host.nproc))
        return f"{here}, {ranks_text(missing) if missing else 'hosts whose ranks do not overlap'} missing"


def _names(hosts: Collection[Member]) -> str:
    """`node-1, node-2`, at most NAMED of them, since all hosts receive the line in one message."""
    more = ", ..." if len(hosts) > NAMED else ""
    return ", ".join(host.host for host in islice(hosts, NAMED)) + more
