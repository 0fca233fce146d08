"""Which hosts take part in a job of changing size: the first host counts them and calls the starts.

Every launcher of the job, the first host's too, keeps one connection to the registry. Hosts that come or go
cost one restart of the group; what the ranks do with another WORLD_SIZE is theirs (checkpoints resume).
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_PREEMPTED, CyxjaxError
from cyxjax.launch.elastic.group_start import GroupStart, told
from cyxjax.launch.elastic.server import Agent, HostServer, Said
from cyxjax.launch.ranks_here import HostShare
from cyxjax.launch.rendezvous import protocol
from cyxjax.launch.rendezvous.coordinator import Host
from cyxjax.launch.supervise.restarts import Budget

LAST_CALL_S = 2.0  # after a host came: time for others to come with it
LINE_EVERY_S = 10.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class Over:
    """The end of the job."""

    code: int
    why: str = ""


class Registry:
    """Runs in a thread of the first host's launcher, on `place.master_addr:master_port`.

    low, high: the fewest and the most hosts. The job waits for `low` of them for the group's timeout.
    """

    def __init__(self, place: HostShare, low: int, high: int, max_restarts: int, log: Log) -> None:
        self._events: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._server = HostServer(place, self._events.put, log)
        self.place = self._server.place
        self.low, self.high, self._log = low, high, log
        self._agents: list[Agent] = []
        self._budget = Budget(max_restarts)
        self._over: Over | None = None
        self._caller = threading.Thread(target=self._call, name="cyxjax-registry", daemon=True)

    def start(self) -> "Registry":
        self._server.open()
        self._caller.start()
        return self

    def close(self) -> None:
        """Closes the door and every connection: a host that is still there takes it for the end."""
        if self._caller.is_alive() and self._over is None:
            self._finish(Over(EXIT_PREEMPTED, "the first host leaves, and the job ends with it"))
        self._caller.join(timeout=1.0)
        self._server.close()
        for agent in list(self._agents):
            agent.close()

    def _call(self) -> None:
        number, over = 0, None
        try:
            while (over := self._over or self._one_start(number)) is None:
                number += 1
        except CyxjaxError as error:  # no port for the meeting place
            over = Over(EXIT_INFRASTRUCTURE, str(error))
        except Exception:  # a fault of ours: with this thread gone every host would wait for ever
            over = Over(EXIT_INFRASTRUCTURE, f"the first host cannot go on:\n{traceback.format_exc()}")
        if self._over is None:
            self._finish(over)

    def _one_start(self, number: int) -> Over | None:
        members = self._gather()
        return members if isinstance(members, Over) else self._decide(self._one_round(number, members))

    def _finish(self, over: Over) -> None:
        """Tells every host that the job is over; the first host last, since its launcher then ends."""
        self._over = over
        for agent in sorted(self._agents, key=lambda agent: agent.is_first):
            agent.send({"over": over.code, "why": over.why})

    def _gather(self) -> list[Agent] | Over:
        """The hosts of the next start, the first host first; Over when too few come in time."""
        began = time.monotonic()
        settled, next_line = began + LAST_CALL_S, began + LINE_EVERY_S
        while True:
            now, here = time.monotonic(), len(self._agents)
            ready = here >= self.low and any(agent.is_first for agent in self._agents)
            if ready and (here >= self.high or now >= settled):
                return self._choose()
            if here < self.low and now - began > self.place.timeout_ms / 1000:
                return Over(EXIT_INFRASTRUCTURE, self._too_few())
            if here < self.low and now > next_line:
                next_line += LINE_EVERY_S
                self._log(f"waiting for hosts: {self._here()}, at least {self.low} are needed")
            agent, message = self._next(0.2)
            if message and "came" in message:
                settled = time.monotonic() + LAST_CALL_S

    def _choose(self) -> list[Agent]:
        """The first host, then the others as they came; those above the most are told to wait."""
        agents = sorted(self._agents, key=lambda agent: not agent.is_first)
        for spare in agents[self.high :]:
            self._tell_spare(spare)
        return agents[: self.high]

    def _next(self, seconds: float) -> tuple[Agent | None, protocol.Message | None]:
        """What an agent says, None for its end; the list of agents is kept on the way."""
        try:
            agent, message = self._events.get(timeout=seconds)
        except queue.Empty:
            return None, {}
        if message is None and agent in self._agents:
            self._agents.remove(agent)
        elif message and "came" in message:
            self._agents.append(agent)
        return agent, message

    def _one_round(self, number: int, members: list[Agent]) -> GroupStart:
        """Starts the group on `members` and returns when it has ended on all of them."""
        world = sum(agent.nproc for agent in members)
        host = Host(replace(self.place, world_size=world, base_rank=0, master_port=0))
        host.open(number)
        names = ", ".join(agent.host for agent in members)
        self._log(f"start {number}: {len(members)} host(s), {world} rank(s): {names}")
        try:
            base = 0
            for agent in members:
                share = {"base_rank": base, "world_size": world, "master_port": host.place.master_port}
                agent.send({"start": number, **share})
                base += agent.nproc
            return self._watch(GroupStart(number, members))
        finally:
            host.end()

    def _watch(self, current: GroupStart) -> GroupStart:
        """Follows a start until it has ended on every host that is still there."""
        while current.running:
            agent, message = self._next(0.5 if current.follow_by else LINE_EVERY_S)
            if agent is not None:
                self._note(current, agent, message)
            failure = current.failure
            if failure is not None and current.follow_by and time.monotonic() > current.follow_by:
                current.follow_by = None
                self._ask_to_end(current, told(failure), polite=False)
        return current

    def _note(self, current: GroupStart, agent: Agent, message: protocol.Message | None) -> None:
        if message is None:
            self._note_loss(current, agent)
        elif "came" in message:
            self._note_arrival(current, agent)
        elif message.get("ended") == current.number and agent in current.members:
            try:
                current.note_end(agent, message)
            except ValueError as error:  # of another version: as if it had gone
                self._log(f"host {agent.host} is left out: {protocol.printable(error)}")
                agent.close()
                return
            if message["how"] == "left" and agent in self._agents:  # its connection ends a moment later
                self._agents.remove(agent)

    def _note_loss(self, current: GroupStart, agent: Agent) -> None:
        """The rest cannot go on: their collectives wait for ranks that are gone."""
        if agent not in current.running:
            return
        current.members.remove(agent)
        current.lost.append(agent.host)
        current.changed = f"host {agent.host} is gone"
        self._log(current.changed)
        self._ask_to_end(current, current.changed, polite=False)

    def _note_arrival(self, current: GroupStart, agent: Agent) -> None:
        if len(current.members) >= self.high:
            self._log(f"host {agent.host} is here as a spare: {self.high} hosts are the most")
            self._tell_spare(agent)
        elif not current.changed:
            current.changed = f"host {agent.host} has come"
            why = f"{current.changed}: the group saves and starts again with it"
            self._log(why)
            self._ask_to_end(current, why, polite=True)

    def _tell_spare(self, agent: Agent) -> None:
        agent.send(
            {"say": f"{self.high} hosts are the most, and here: this one waits until one of them goes"}
        )

    def _ask_to_end(self, current: GroupStart, why: str, *, polite: bool) -> None:
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
        time.sleep(decision.delay_s)
        return None

    def _here(self) -> str:
        return f"{len(self._agents)} here ({', '.join(agent.host for agent in self._agents) or 'none'})"

    def _too_few(self) -> str:
        return (
            f"Timeout waiting for hosts: {self._here()}, at least {self.low} are needed, after "
            f"{self.place.timeout_ms / 1000:g} s. HINT: see why the others did not start, raise "
            "DISTRIBUTED_TIMEOUT_MS, or lower MIN in --nnodes MIN:MAX."
        )
