"""The policy of a job: which hosts take part in a start of the ranks, when it ends and what follows.

A pure state machine: events of hosts and the time go in, orders come out. Sockets, threads and the clock are
the caller's (hosts.py), so that simulated hosts are led by the same code (scripts/bench/simulate.py).

A job of fixed size is one whose fewest and most are the same: it waits for all its ranks. A host that joins
or leaves changes the size of an elastic job, at no cost. A fixed job cannot go on without it: there a lost
host is a failure, on which the budget of restarts decides, and a host that is asked to stop ends the job.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED, EXIT_SECONDARY
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group import protocol
from cyxjax.launch.group.group_start import Budget, GroupStart, Member, describe
from cyxjax.launch.group.roster import ranks_text

LAST_CALL_S = 2.0  # after a host joined: time for others to join with it
LINE_EVERY_S = 10.0
NAMED = 16  # of the hosts in a line


class Event(NamedTuple):
    """What happened to a host: it joined, its connection was lost, or it sent `message`."""

    host: Member
    kind: Literal["joined", "lost", "message"]
    message: protocol.Message = {}


class Send(NamedTuple):
    """Order: send `message` to `host`."""

    host: Member
    message: protocol.Message


class Log(NamedTuple):
    """Order: show `line` to the person who watches the first host."""

    line: str


class OpenStart(NamedTuple):
    """Order: from now on the ranks of start `number` may join, `world_size` of them."""

    number: int
    world_size: int


class CloseStart(NamedTuple):
    """Order: the ranks of the last start have ended."""


class JobEnd(NamedTuple):
    """The job is over, with this exit code on every host; it was sent to all of them."""

    code: int
    why: str = ""


Order = Send | Log | OpenStart | CloseStart


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

    timeout_s: how long the job waits for enough hosts. end: set when the job is over.
    """

    def __init__(self, size: Size, timeout_s: float, budget: Budget, now: float) -> None:
        self.size, self._timeout_s, self._budget = size, timeout_s, budget
        self.hosts: dict[Member, None] = {}  # in the order in which they joined
        self.end: JobEnd | None = None
        self._orders: list[Order] = []
        self._now = now
        self._number = 0
        self._start: GroupStart | None = None
        self._num_ranks = 0  # of all hosts
        self._wait(now)

    def handle(self, now: float, event: Event | None = None) -> list[Order]:
        """What to do at `now`, after `event`. Without an event: after time has passed, see `wake_at`."""
        self._now = now
        if self.end is None:
            if event is not None:
                self._note(event)
            self._proceed()
        orders, self._orders = self._orders, []
        return orders

    def finish(self, code: int, why: str) -> list[Order]:
        """Ends the job from outside: the first host leaves, or cannot go on."""
        if self.end is None:
            self._finish(JobEnd(code, why))
        orders, self._orders = self._orders, []
        return orders

    @property
    def wake_at(self) -> float:
        """When `handle` is to be called even if nothing happens."""
        if self.end is not None:
            return float("inf")
        if self._start is not None:
            return float("inf") if self._start.follow_by is None else self._start.follow_by
        if self._now < self._began:
            return self._began
        return min(at for at in (self._settled, self._next_line, self._late) if at > self._now)

    # -- between starts -------------------------------------------------------------------------------

    def _wait(self, began: float) -> None:
        """From `began` on, hosts are gathered for the next start."""
        self._began, self._settled = began, began + LAST_CALL_S
        self._next_line, self._late = began + LINE_EVERY_S, began + self._timeout_s

    def _proceed(self) -> None:
        if self._start is not None:
            self._end_followers(self._start)
            if self._start.is_running:
                return
            done, self._start = self._start, None
            self._orders.append(CloseStart())
            self._number += 1
            self._wait(self._now)
            self._decide(done)
        if self.end is None and self._now >= self._began:
            self._gather()

    def _gather(self) -> None:
        """Begins a start when enough hosts are here; ends the job when they are too late."""
        if self.size.is_enough(len(self.hosts), self._num_ranks):
            members = []
            if self.size.is_most(len(self.hosts)) or self._now >= self._settled:
                members = self.size.choose(self.hosts)
            if members:
                self._begin(members)
                return
        if self._now >= self._late:
            self._finish(JobEnd(EXIT_INFRASTRUCTURE, self._too_few()))
        elif self._now >= self._next_line:
            self._next_line = self._now + LINE_EVERY_S
            self._orders.append(Log(f"waiting for hosts: {self._awaited()}"))

    def _begin(self, members: list[Member]) -> None:
        chosen = set(members)
        for spare in self.hosts:
            if spare not in chosen:
                self._tell_spare(spare)
        number, world_size = self._number, sum(host.nproc for host in members)
        self._orders.append(OpenStart(number, world_size))
        if not self.size.is_fixed or len(members) > 1:
            what = f"{len(members)} host(s), {world_size} rank(s)"
            self._orders.append(Log(f"start {number}: {what}: {_names(members)}"))
        base_rank = 0
        for host in members:
            self._send(host, {"start": number, "base_rank": base_rank, "world_size": world_size})
            base_rank += host.nproc
        self._start = GroupStart(number, members)

    # -- events ---------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        host, current = event.host, self._start
        if event.kind == "joined":
            self.hosts[host] = None
            self._num_ranks += host.nproc
            self._settled = self._now + LAST_CALL_S
            if current is not None:
                self._note_arrival(current, host)
        elif event.kind == "lost":
            self._forget(host)
            if current is not None:
                self._note_loss(current, host)
        elif current is not None and event.message.get("ended") == current.number and current.has(host):
            self._note_end(current, event)

    def _forget(self, host: Member) -> None:
        if host in self.hosts:
            del self.hosts[host]
            self._num_ranks -= host.nproc

    def _note_arrival(self, current: GroupStart, host: Member) -> None:
        if self.size.is_fixed or len(current.members) >= self.size.high:
            self._orders.append(Log(f"host {host.host} is here as a spare: {self._no_place_for(host)}"))
            self._tell_spare(host)
        elif not current.changed:
            current.changed = f"host {host.host} has joined"
            why = f"{current.changed}: the group saves and starts again with it"
            self._orders.append(Log(why))
            self._ask_to_end(current, why, polite=True)

    def _note_loss(self, current: GroupStart, host: Member) -> None:
        """The rest cannot go on: their collectives wait for ranks that are gone."""
        if not current.note_loss(host):
            return
        current.changed = f"host {host.host} is gone"
        if current.members:  # a host that was alone knows why it ends
            self._orders.append(Log(current.changed))
        self._ask_to_end(current, current.changed, polite=False)

    def _note_end(self, current: GroupStart, event: Event) -> None:
        try:
            current.note_end(event.host, event.message, self._now)
        except (KeyError, TypeError, ValueError) as error:  # of another version: as if it had gone
            why = f"host {event.host.host} is left out: {protocol.printable(repr(error))}"
            self._orders.append(Log(why))
            self._send(event.host, {"refused": why})
            self._note(Event(event.host, "lost"))
            return
        if event.message["how"] == "left":  # its connection ends a moment later
            self._forget(event.host)

    def _end_followers(self, current: GroupStart) -> None:
        """Some time after a failure, ends the hosts that have not noticed it."""
        if current.follow_by is None or self._now < current.follow_by:
            return
        assert current.failure is not None
        current.follow_by = None
        self._ask_to_end(current, describe(current.failure), polite=False)

    def _ask_to_end(self, current: GroupStart, why: str, *, polite: bool) -> None:
        if current.ordered:  # a rack that fails is many losses: one order to the others is enough
            return
        current.ordered = not polite
        for host in current.running:
            reason = {} if host.is_first else {"say": why}  # on the first host the log is read
            self._send(host, {"end": current.number, "polite": polite, **reason})

    # -- what follows ---------------------------------------------------------------------------------

    def _decide(self, done: GroupStart) -> None:
        """What follows a start: the end of the job, or another start when the delay of a restart is over."""
        hows = {ended.how for ended in done.ended.values()}
        asked, failure = "left" in hows, _failure(done)
        if hows == {"ok"} and not done.lost:
            self._finish(JobEnd(EXIT_OK))
        elif not self.size.is_fixed and (done.changed or asked):
            return
        elif "interrupted" in hows and (failure is None or failure.secondary):
            self._finish(JobEnd(EXIT_INTERRUPT, "a rank was interrupted, and the job ends with it"))
        elif failure is None or (asked and failure.secondary):
            why = "a host was asked to stop, and the job ends with it" if asked else ""
            self._finish(JobEnd(EXIT_PREEMPTED, why))
        else:
            decision = self._budget.decide(failure, done.step, asked_to_end=asked)
            alone = len(done.members) + len(done.lost) == 1
            line = decision.line if alone else f"{describe(failure)}; {decision.line}"
            for host in self.hosts:
                self._send(host, {"decided": line})
            if not decision.again:
                self._finish(JobEnd(decision.exit_code))
            self._wait(self._now + decision.delay_s)

    def _finish(self, end: JobEnd) -> None:
        """Sends the end of the job to every host; to the first host last, since its launcher then ends."""
        self.end = end
        for host in sorted(self.hosts, key=lambda host: host.is_first):
            self._send(host, {"over": end.code, "why": end.why})

    def _send(self, host: Member, message: protocol.Message) -> None:
        self._orders.append(Send(host, message))

    # -- words ----------------------------------------------------------------------------------------

    def _tell_spare(self, host: Member) -> None:
        self._send(host, {"say": f"{self._no_place_for(host)}: this one waits until one of them goes"})

    def _no_place_for(self, host: Member) -> str:
        if self.size.is_fixed:
            ranks = ranks_text(range(host.base_rank, host.base_rank + host.nproc))
            return f"{ranks} of {self.size.world_size} are taken"
        return f"{self.size.high} hosts are the most"

    def _awaited(self) -> str:
        here = f"{len(self.hosts)} here ({_names(self.hosts) or 'none'})"
        if not self.size.is_fixed:
            return f"{here}, at least {self.size.low} are needed"
        missing = set(range(self.size.world_size))
        for host in self.hosts:
            missing -= set(range(host.base_rank, host.base_rank + host.nproc))
        return f"{here}, {ranks_text(sorted(missing)) or 'hosts whose ranks do not overlap'} missing"

    def _too_few(self) -> str:
        lower = "" if self.size.is_fixed else ", or lower MIN in --nnodes MIN:MAX"
        return (
            f"Timeout waiting for hosts: {self._awaited()}, after {self._timeout_s:g} s. HINT: see why the "
            f"others did not start, or raise DISTRIBUTED_TIMEOUT_MS{lower}."
        )


def _failure(done: GroupStart) -> ErrorRecord | None:
    """The error that a start failed with; the loss of a host where no rank has one of its own."""
    failure = done.failure
    if done.lost and (failure is None or failure.secondary):
        return ErrorRecord(-1, "HostLost", done.changed, True, EXIT_SECONDARY, done.lost[0], step=done.step)
    return failure


def _names(hosts: Collection[Member]) -> str:
    """`node-1, node-2`, the first of many."""
    shown = ", ".join(host.host for host in islice(hosts, NAMED))
    return f"{shown} and {len(hosts) - NAMED:,} more" if len(hosts) > NAMED else shown
