"""What the first host of an elastic job decides: who takes part in a start, when it ends, what follows.

The hosts' words come in and orders go out; sockets, threads and the clock are the caller's, so that
simulated hosts are led by the same lines as real ones (scripts/bench/simulate.py).
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_PREEMPTED
from cyxjax.launch.elastic.group_start import GroupStart, Member, told
from cyxjax.launch.group import protocol
from cyxjax.launch.supervise.restarts import Budget

LAST_CALL_S = 2.0  # after a host came: time for others to come with it
LINE_EVERY_S = 10.0
IDLE_S = 600.0  # while a start runs: there is nothing to do but to listen
NAMED = 16  # of the hosts in a line

Said = tuple[Member, protocol.Message | None]  # what a host says; {"came": True} first, None at its end


class World(Protocol):
    """Time, and what the hosts say; how a group meets."""

    def now(self) -> float:
        """Seconds on a clock that does not jump."""

    def next(self, seconds: float) -> Said | None:
        """What a host says next; None when none does within `seconds`."""

    def sleep(self, seconds: float) -> None:
        """Lets time pass; what hosts say meanwhile waits."""

    def meeting(self, number: int, num_ranks: int) -> AbstractContextManager[int]:
        """Where the ranks of start `number` meet: its port, open until the start is over."""


@dataclass(frozen=True)
class Over:
    """The end of the job."""

    code: int
    why: str = ""


class Rounds:
    """Start after start of a group of at least `low`, at most `high` hosts.

    timeout_s: how long the job waits for `low` of them.
    """

    def __init__(
        self,
        low: int,
        high: int,
        timeout_s: float,
        budget: Budget,
        world: World,
        log: Callable[[str], None],
    ) -> None:
        self.low, self.high, self._timeout_s = low, high, timeout_s
        self._budget, self._world, self._log = budget, world, log
        self.agents: dict[Member, None] = {}  # in the order in which they came

    def one_start(self, number: int) -> Over | None:
        """Gathers hosts, leads start `number` to its end; what follows, None for another start."""
        members = self._gather()
        return members if isinstance(members, Over) else self._decide(self._one_round(number, members))

    def _gather(self) -> list[Member] | Over:
        """The hosts of the next start, the first host first; Over when too few come in time."""
        began = self._world.now()
        settled, next_line = began + LAST_CALL_S, began + LINE_EVERY_S
        while True:
            now, here = self._world.now(), len(self.agents)
            ready = here >= self.low and any(agent.is_first for agent in self.agents)
            if ready and (here >= self.high or now >= settled):
                return self._choose()
            if here < self.low and now - began > self._timeout_s:
                return Over(EXIT_INFRASTRUCTURE, self._too_few())
            if here < self.low and now > next_line:
                next_line += LINE_EVERY_S
                self._log(f"waiting for hosts: {self._here()}, at least {self.low} are needed")
            agent, message = self._next(0.2)
            if message and "came" in message:
                settled = self._world.now() + LAST_CALL_S

    def _choose(self) -> list[Member]:
        """The first host, then the others as they came; those above the most are told to wait."""
        agents = sorted(self.agents, key=lambda agent: not agent.is_first)
        for spare in agents[self.high :]:
            self._tell_spare(spare)
        return agents[: self.high]

    def _next(self, seconds: float) -> tuple[Member | None, protocol.Message | None]:
        """What an agent says, None for its end; the list of agents is kept on the way."""
        said = self._world.next(seconds)
        if said is None:
            return None, {}
        agent, message = said
        if message is None:
            self.agents.pop(agent, None)
        elif "came" in message:
            self.agents[agent] = None
        return agent, message

    def _one_round(self, number: int, members: list[Member]) -> GroupStart:
        """Starts the group on `members` and returns when it has ended on all of them."""
        world = sum(agent.nproc for agent in members)
        with self._world.meeting(number, world) as port:
            self._log(f"start {number}: {len(members)} host(s), {world} rank(s): {_names(members)}")
            base = 0
            for agent in members:
                share = {"base_rank": base, "world_size": world, "master_port": port}
                agent.send({"start": number, **share})
                base += agent.nproc
            return self._watch(GroupStart(number, members, now=self._world.now))

    def _watch(self, current: GroupStart) -> GroupStart:
        """Follows a start until it has ended on every host that is still there."""
        while current.is_running:
            agent, message = self._next(0.5 if current.follow_by else IDLE_S)
            if agent is not None:
                self._note(current, agent, message)
            if current.follow_by and self._world.now() > current.follow_by:
                assert current.failure is not None
                current.follow_by = None
                self._ask_to_end(current, told(current.failure), polite=False)
        return current

    def _note(self, current: GroupStart, agent: Member, message: protocol.Message | None) -> None:
        if message is None:
            self._note_loss(current, agent)
        elif "came" in message:
            self._note_arrival(current, agent)
        elif message.get("ended") == current.number and current.has(agent):
            try:
                current.note_end(agent, message)
            except ValueError as error:  # of another version: as if it had gone
                self._log(f"host {agent.host} is left out: {protocol.printable(error)}")
                agent.close()
                return
            if message["how"] == "left":  # its connection ends a moment later
                self.agents.pop(agent, None)

    def _note_loss(self, current: GroupStart, agent: Member) -> None:
        """The rest cannot go on: their collectives wait for ranks that are gone."""
        if not current.note_loss(agent):
            return
        current.changed = f"host {agent.host} is gone"
        self._log(current.changed)
        self._ask_to_end(current, current.changed, polite=False)

    def _note_arrival(self, current: GroupStart, agent: Member) -> None:
        if len(current.members) >= self.high:
            self._log(f"host {agent.host} is here as a spare: {self.high} hosts are the most")
            self._tell_spare(agent)
        elif not current.changed:
            current.changed = f"host {agent.host} has come"
            why = f"{current.changed}: the group saves and starts again with it"
            self._log(why)
            self._ask_to_end(current, why, polite=True)

    def _tell_spare(self, agent: Member) -> None:
        agent.send(
            {"say": f"{self.high} hosts are the most, and here: this one waits until one of them goes"}
        )

    def _ask_to_end(self, current: GroupStart, why: str, *, polite: bool) -> None:
        if current.ordered:  # a rack that fails is many losses: one order to the others is enough
            return
        current.ordered = not polite
        for agent in current.running:
            reason = {} if agent.is_first else {"say": why}  # on the first host our own lines are read
            agent.send({"end": current.number, "polite": polite, **reason})

    def _decide(self, done: GroupStart) -> Over | None:
        """What follows; None for another start. A change of hosts does not count as a failure."""
        hows = {ended.how for ended in done.ended.values()}
        if hows == {"ok"} and not done.lost:
            return Over(EXIT_OK)
        if done.changed or "left" in hows:
            return None
        if done.failure is None:
            return Over(EXIT_PREEMPTED, "the ranks were asked to end")
        decision = self._budget.decide(done.failure, done.step)
        line = f"{told(done.failure)}; {decision.line}"
        if not decision.again:
            return Over(decision.exit_code, line)
        self._log(line)
        self._world.sleep(decision.delay_s)
        return None

    def _here(self) -> str:
        return f"{len(self.agents)} here ({_names(self.agents) or 'none'})"

    def _too_few(self) -> str:
        return (
            f"Timeout waiting for hosts: {self._here()}, at least {self.low} are needed, after "
            f"{self._timeout_s:g} s. HINT: see why the others did not start, raise "
            "DISTRIBUTED_TIMEOUT_MS, or lower MIN in --nnodes MIN:MAX."
        )


def _names(agents: Collection[Member]) -> str:
    """`node-1, node-2`, the first of many."""
    shown = ", ".join(agent.host for agent in islice(agents, NAMED))
    return f"{shown} and {len(agents) - NAMED:,} more" if len(agents) > NAMED else shown
