"""Jobs of thousands of hosts that fail, on simulated time, led by the launcher's own policy.

    python scripts/bench/simulate.py [--hosts 1000 10000] [--failures 400] [--seed 0]
    python scripts/bench/simulate.py --quick      # 64 hosts: proves that it runs

Hosts are simulated; who takes part, when a start ends and what follows is decided by
`cyxjax.launch.group.controller`, the code that leads real hosts, through their own messages. Each host's life
is exponential; one in ten failures is an exception of a rank, the others take the host away, which is
noticed after a while, and comes back repaired. Saves stop the training. The first host does not fail: a job
ends with it.

Printed beside the share of time that was steps which count: what `cyxjax plan --mtbf` says of it (Daly's
formula, with the mean restart of the row), at Daly's interval and at others; and the CPU time and messages
that leading a start of so many hosts takes (the simulation of the hosts included).
"""

import argparse
import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from cyxjax.errors import EXIT_USER_ERROR
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group.controller import Controller, Size
from cyxjax.launch.group.group_start import Budget, end_message
from cyxjax.observe.scaling import goodput, save_every_s

HOUR_S = 3600.0
IDLE_S = 600.0  # after which the simulation looks whether all failures have happened
MEETING_S = 0.002  # a rank's share of the time in which 1,000 meet: scripts/bench/rendezvous.py


@dataclass(frozen=True)
class Cluster:
    """What happens to hosts, in seconds. every_s: of training between two saves."""

    hosts: int
    spares: int
    mtbf_s: float  # of one host
    every_s: float
    low: int = 1  # the fewest hosts that train
    save_s: float = 60.0
    start_s: float = 90.0  # from the call to the first step, without the meeting: processes, restore
    meeting_s: float = MEETING_S  # for each rank
    end_s: float = 1.0  # from the order to end to the end of the last process
    detect_s: float = 10.0  # until the silence of a host is taken for its end
    repair_s: float = HOUR_S
    exceptions: float = 0.1  # the share of failures that leave the host


class Result(NamedTuple):
    goodput: float  # share of hosts x time that was steps which count
    restart_s: float  # from a failure to the next first step, the mean where nothing failed meanwhile
    starts: int
    failures: int
    hours: float
    cpu_s: float  # of policy and simulation, for a start
    messages: float  # to and from hosts, for a start
    end: str  # why the job ended by itself; "" where it went on to the end of the simulation


@dataclass(eq=False)
class Host:
    """One life of a simulated host: a Member to the controller."""

    host: str
    is_first: bool = False
    nproc: int = 1
    alive: bool = True
    running: int = -1  # the start under way

    @property
    def base_rank(self) -> int:
        return 0 if self.is_first else -1


@dataclass
class Training:
    """What the group has done of its start."""

    began_s: float  # of its first step
    members: list[Host] = field(default_factory=list)
    active: bool = True


class World:
    """Simulated time; what hosts send arrives when it is due."""

    def __init__(self, cluster: Cluster, failures: int, seed: int) -> None:
        self.cluster, self._left, self._random = cluster, failures, random.Random(seed)
        self._now, self._order = 0.0, count()
        self._due: list[tuple[float, int, Host, dict | str | None]] = []
        self._training = Training(0.0, active=False)
        self._cut_s: float | None = None  # when training stopped
        self._tries = 0  # to start since then
        self._kept_s = self._reached_s = 0.0  # of training: in the newest checkpoint, and at the last end
        self.useful_s, self.failures, self.starts, self.messages = 0.0, 0, 0, 0
        self.restarts_s: list[float] = []
        self.decided = ""  # after the last failure
        for number in range(cluster.hosts + cluster.spares):
            self._come(Host(f"node-{number}", is_first=number == 0), 0.0)

    # -- what the controller sees and orders ---------------------------------------------------------

    def now(self) -> float:
        return self._now

    def log(self, line: str) -> None:
        """Nobody watches."""

    def open_start(self, number: int, world_size: int) -> None:
        self.starts, self._tries = self.starts + 1, self._tries + 1
        began_s = self._now + self.cluster.start_s + world_size * self.cluster.meeting_s
        self._training = Training(began_s)

    def close_start(self) -> None:
        """Its training has stopped before."""

    def send(self, host: Host, message: dict) -> None:
        """A message of the controller to a host, which obeys after a while."""
        self.messages += 1
        self.decided = message.get("decided", self.decided)
        if not host.alive:
            self._training.active &= "start" not in message  # the others would wait for it
            return
        if "start" in message:
            host.running = message["start"]
            self._training.members.append(host)
        elif message.get("end") == host.running >= 0:
            if message["polite"]:
                self._stop(saved=True)
            wait_s = self.cluster.end_s + (self.cluster.save_s if message["polite"] else 0.0)
            self._say(host, end_message(host.running, "preempted", int(self._kept_s)), wait_s)

    # -- what happens to hosts --------------------------------------------------------------------------

    def fail(self, host: Host, gone: bool) -> None:
        """A host's life ends, or a rank of it does; the others wait in their collectives."""
        if not host.alive:
            return
        self.failures += 1
        if host.running >= 0:
            self._reached_s = self._kept_s + self._trained()
            self._stop(saved=False)
        if gone:
            host.alive = False
            self._say(host, None, self.cluster.detect_s)
            self._come(Host(host.host, nproc=host.nproc), self.cluster.repair_s)
            return
        self._mortal(host)
        if host.running >= 0:
            error = ErrorRecord(1, "OSError", f"failure {self.failures}", exit_code=EXIT_USER_ERROR)
            error.at_monotonic_s = time.monotonic()
            self._say(host, end_message(host.running, "failed", int(self._reached_s), error), 0.0)

    def next(self, until_s: float, controller: Controller) -> None:
        """Tells the controller what happens next, or that nothing does until then. Raises: Done."""
        while self._due and self._due[0][0] <= until_s:
            at_s, _, host, what = heapq.heappop(self._due)
            self._now = max(self._now, at_s)
            if what == "fails":
                if self._left > 0:
                    self._left -= 1
                    self.fail(host, gone=self._random.random() >= self.cluster.exceptions)
            elif what is None or host.alive:
                self.messages += 1
                if isinstance(what, dict):
                    if host.running != what["ended"]:
                        continue  # it had reported another end
                    host.running = -1
                    controller.hear(host, what, self._now)
                elif what is None:
                    controller.lose(host, self._now)
                else:
                    controller.join(host, self._now)
                return
        if not self._left:
            raise Done
        self._now = until_s
        controller.act(self._now)

    def _come(self, host: Host, after_s: float) -> None:
        self._say(host, "joins", after_s)
        if not host.is_first:
            self._mortal(host, after_s)

    def _mortal(self, host: Host, after_s: float = 0.0) -> None:
        self._say(host, "fails", after_s + self._random.expovariate(1 / self.cluster.mtbf_s))

    def _say(self, host: Host, what: dict | str | None, after_s: float) -> None:
        heapq.heappush(self._due, (self._now + after_s, next(self._order), host, what))

    def _stop(self, saved: bool) -> None:
        """Training stops now; what came after the last save is lost unless there is one now."""
        training = self._training
        if not training.active:
            return
        training.active = False
        if self._now >= training.began_s:
            if self._cut_s is not None and self._tries == 1:
                self.restarts_s.append(training.began_s - self._cut_s)
            self._cut_s, self._tries = self._now, 0
        kept_s = self._trained(whole=not saved)
        self._kept_s += kept_s
        self.useful_s += kept_s * len(training.members)

    def finish(self) -> None:
        """The end of the simulation: what trains has saved."""
        self._stop(saved=True)

    def _trained(self, whole: bool = False) -> float:
        """Seconds of training in this start: those between saves, or all of them."""
        cluster = self.cluster
        ran_s = max(0.0, self._now - self._training.began_s)
        saves, rest_s = divmod(ran_s, cluster.every_s + cluster.save_s)
        return saves * cluster.every_s + (0.0 if whole else min(rest_s, cluster.every_s))


class Done(Exception):
    """All failures have happened."""


def simulate(cluster: Cluster, failures: int, seed: int = 0) -> Result:
    """A job until so many failures have happened to its hosts and spares."""
    world = World(cluster, failures, seed)
    size, budget = Size(cluster.low, cluster.hosts), Budget(10**9)
    controller = Controller(size, 1e9, budget, world.now(), world)
    began, end = time.process_time(), ""
    try:
        while controller.end is None:
            world.next(min(controller.wake_at(world.now()), world.now() + IDLE_S), controller)
        end = controller.end.why or world.decided
    except Done:
        world.finish()
    cpu_s = time.process_time() - began
    each = max(1, world.starts)
    return Result(
        world.useful_s / (world.now() * cluster.hosts),
        sum(world.restarts_s) / max(1, len(world.restarts_s)),
        world.starts,
        world.failures,
        world.now() / HOUR_S,
        cpu_s / each,
        world.messages / each,
        end,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", nargs="+", type=int, default=[1000, 10_000])
    parser.add_argument("--mtbf-hours", type=float, default=20_000.0, help="of one host")
    parser.add_argument("--failures", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="64 hosts, few failures: proves that it runs")
    args = parser.parse_args()
    if args.quick:
        args.hosts, args.failures = [64], 60
    print(HEAD)
    for hosts in args.hosts:
        for row in rows(hosts, args.mtbf_hours * HOUR_S, args.failures, args.seed):
            print(row, flush=True)


HEAD = """| hosts | what | goodput | by the formula | a restart | CPU time a start | messages |
| ---: | --- | ---: | ---: | ---: | ---: | ---: |"""


def rows(hosts: int, mtbf_s: float, failures: int, seed: int) -> Iterator[str]:
    """A fixed number of hosts with enough spares at three intervals; then hosts that come and go."""
    whole = Cluster(hosts, 0, mtbf_s, 0.0)
    best_s = save_every_s(whole.save_s, mtbf_s / hosts)
    spares = max(8, round(4 * hosts * whole.repair_s / mtbf_s))
    for factor, what in ((1.0, "Daly's interval"), (0.4, "2.5 times as often"), (2.5, "2.5 times as seldom")):
        cluster = replace(whole, spares=spares, low=hosts, every_s=factor * best_s)
        found = simulate(cluster, failures, seed)
        share = goodput(cluster.every_s, cluster.save_s, found.restart_s, mtbf_s / hosts)
        yield line(hosts, f"{what}: {cluster.every_s / 60:.0f} min, {spares} spares", found, f"{share:.1%}")
    found = simulate(replace(whole, every_s=best_s, low=1), failures, seed)
    yield line(hosts, "no spares: with fewer until a host is back", found, "")


def line(hosts: int, what: str, found: Result, formula: str) -> str:
    what += f"; ended: {found.end}" if found.end else ""
    numbers = f"{found.restart_s:.0f} s | {1e3 * found.cpu_s:.1f} ms | {found.messages:,.0f}"
    return f"| {hosts:,} | {what} | {found.goodput:.1%} | {formula} | {numbers} |"


if __name__ == "__main__":
    main()
