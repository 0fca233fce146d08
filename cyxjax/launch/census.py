"""Which hosts take part in a job of changing size: the first host counts them and calls the starts.

Every launcher of the job, the first host's too, keeps one connection to the census. Hosts that come or go
cost one restart of the group; what the ranks do with another WORLD_SIZE is theirs (checkpoints resume).
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_PREEMPTED, CyxjaxError
from cyxjax.launch import wire
from cyxjax.launch.door import Agent, Door, Said
from cyxjax.launch.host import Host
from cyxjax.launch.place import Place
from cyxjax.launch.records import ErrorRecord
from cyxjax.launch.report import first_of
from cyxjax.launch.restarts import Budget

LAST_CALL_S = 2.0  # after a host came: time for others to come with it
LINE_EVERY_S = 10.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How a start ended on one host: 'ok', 'preempted' or 'failed' with its first error."""

    how: str
    step: int = -1
    first: ErrorRecord | None = None


@dataclass
class Round:
    """One start of the group: who is in it, how it ended for them, and who came or went meanwhile."""

    number: int
    members: list[Agent]
    ended: dict[Agent, Ended] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    changed: str = ""

    @property
    def running(self) -> list[Agent]:
        return [agent for agent in self.members if agent not in self.ended]

    @property
    def records(self) -> list[ErrorRecord]:
        return [ended.first for ended in self.ended.values() if ended.first is not None]


@dataclass(frozen=True)
class Over:
    """The end of the job."""

    code: int
    why: str = ""


class Census:
    """Runs in a thread of the first host's launcher, on `place.master_addr:master_port`.

    low, high: the fewest and the most hosts. The job waits for `low` of them for the group's timeout.
    """

    def __init__(self, place: Place, low: int, high: int, max_restarts: int, log: Log) -> None:
        self._events: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._door = Door(place, self._events.put)
        self.place = self._door.place
        self.low, self.high, self._log = low, high, log
        self._agents: list[Agent] = []
        self._budget = Budget(max_restarts)
        self._over: Over | None = None
        self._caller = threading.Thread(target=self._call, name="cyxjax-census", daemon=True)

    def start(self) -> "Census":
        self._door.open()
        self._caller.start()
        return self

    def close(self) -> None:
        """Closes the door and every connection: a host that is still there takes it for the end."""
        if self._caller.is_alive() and self._over is None:
            self._finish(Over(EXIT_PREEMPTED, "the first host leaves, and the job ends with it"))
        self._caller.join(timeout=1.0)
        self._door.close()
        for agent in list(self._agents):
            agent.close()

    def _call(self) -> None:
        number = 0
        while self._over is None:
            try:
                members = self._gather()
                over = (
                    members if isinstance(members, Over) else self._decide(self._one_round(number, members))
                )
            except CyxjaxError as error:  # no port for the meeting place
                over = Over(EXIT_INFRASTRUCTURE, str(error))
            number += 1
            if over is not None:
                self._finish(over)

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
                return sorted(self._agents, key=lambda agent: not agent.is_first)[: self.high]
            if here < self.low and now - began > self.place.timeout_ms / 1000:
                return Over(EXIT_INFRASTRUCTURE, self._too_few())
            if here < self.low and now > next_line:
                next_line += LINE_EVERY_S
                self._log(f"waiting for hosts: {self._here()}, at least {self.low} are needed")
            agent, message = self._next(0.2)
            if message and "came" in message:
                settled = time.monotonic() + LAST_CALL_S

    def _next(self, seconds: float) -> tuple[Agent | None, wire.Message | None]:
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

    def _one_round(self, number: int, members: list[Agent]) -> Round:
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
            return self._watch(Round(number, members))
        finally:
            host.end()

    def _watch(self, current: Round) -> Round:
        while current.running:
            agent, message = self._next(LINE_EVERY_S)
            if agent is None:
                continue
            if message is None:
                self._note_loss(current, agent)
            elif "came" in message:
                self._note_arrival(current, agent)
            elif message.get("ended") == current.number and agent in current.members:
                current.ended[agent] = _parse_end(message)
                if message["how"] == "left" and agent in self._agents:  # its connection ends a moment later
                    self._agents.remove(agent)
        return current

    def _note_loss(self, current: Round, agent: Agent) -> None:
        """The rest cannot go on: their collectives wait for ranks that are gone."""
        if agent not in current.running:
            return
        current.members.remove(agent)
        current.lost.append(agent.host)
        current.changed = f"host {agent.host} is gone"
        self._log(current.changed)
        self._ask_to_end(current, polite=False)

    def _note_arrival(self, current: Round, agent: Agent) -> None:
        if len(current.members) >= self.high:
            self._log(f"host {agent.host} is here as a spare: {self.high} hosts are the most")
        elif not current.changed:
            current.changed = f"host {agent.host} has come"
            self._log(f"{current.changed}: the group saves and starts again with it")
            self._ask_to_end(current, polite=True)

    def _ask_to_end(self, current: Round, *, polite: bool) -> None:
        for agent in current.running:
            agent.send({"end": current.number, "polite": polite})

    def _decide(self, done: Round) -> Over | None:
        """What follows; None for another start. A change of hosts does not count as a failure."""
        hows = {ended.how for ended in done.ended.values()}
        if hows == {"ok"} and not done.lost:
            return Over(EXIT_OK)
        if done.changed or "left" in hows:
            return None
        if "failed" not in hows:
            return Over(EXIT_PREEMPTED, "the ranks were asked to end")
        step = max(ended.step for ended in done.ended.values())
        decision = self._budget.decide(first_of(done.records), step)
        self._log(decision.line)
        time.sleep(decision.delay_s)
        return None if decision.again else Over(decision.exit_code, decision.line)

    def _here(self) -> str:
        return f"{len(self._agents)} here ({', '.join(agent.host for agent in self._agents) or 'none'})"

    def _too_few(self) -> str:
        return (
            f"Timeout waiting for hosts: {self._here()}, at least {self.low} are needed, after "
            f"{self.place.timeout_ms / 1000:g} s. HINT: see why the others did not start, raise "
            "DISTRIBUTED_TIMEOUT_MS, or lower MIN in --nnodes MIN:MAX."
        )


def _parse_end(message: wire.Message) -> Ended:
    first = message.get("first")
    record = None if first is None else ErrorRecord(**first)
    return Ended(str(message["how"]), int(message.get("step", -1)), record)


def end_message(number: int, how: str, step: int, records: Sequence[ErrorRecord]) -> wire.Message:
    """What an agent tells of the end of start `number`. Of its first error only what decisions need."""
    first = first_of(records) if records else None
    said = None
    if first is not None:
        names = ("rank", "type", "secondary", "exit_code", "host", "start", "step", "source", "at_s")
        said = {name: getattr(first, name) for name in names}
        # clocks of several hosts are only comparable as time of day
        said |= {"message": first.message[:2000], "at_monotonic_s": first.at_s}
    return {"ended": number, "how": how, "step": step, "first": said}
