"""Goodput of jobs with thousands of failing hosts, in simulated time, with the launcher's own policy.

    python scripts/bench/simulate.py [--hosts 1000 10000] [--failures 400] [--seed 0]
    python scripts/bench/simulate.py --quick      # 64 hosts, as a test

Only the hosts are simulated: `cyxjax.launch.group.controller`, the code that controls real hosts by the same
messages, decides which hosts take part, when a start ends and what follows. The lifetime of a host is
exponentially distributed. One in ten failures is an exception in a rank; in the others the host is lost,
which is detected after 10 s, and returns repaired. Saves block training. The first host never fails, because
the job would end with it.

Prints the goodput (the share of time spent in steps that were kept) at Daly's save interval and at others,
the prediction of `cyxjax plan --mtbf` (Daly's formula with the mean restart time of the row), and the CPU
time and messages that a start of all hosts takes (the simulation of the hosts included).
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
TICK_S, BUSY_S = 0.5, 130.0  # as the server does, for as long after an event as the controller may wait
IDLE_S = 600.0  # interval of the check whether all failures have happened
MEETING_S = 0.002  # rendezvous time per rank; rendezvous.py measures more, since its ranks share a machine


@dataclass(frozen=True)
class Cluster:
    """Hosts and their failures; times in seconds. every_s: training time between two saves."""

    hosts: int
    spares: int
    mtbf_s: float  # of one host
    every_s: float
    low: int = 1  # the fewest hosts that train
    save_s: float = 60.0
    start_s: float = 90.0  # to the first step: processes and restore, without the rendezvous
    meeting_s: float = MEETING_S  # of the rendezvous, per rank
    end_s: float = 1.0  # from the order to end to the end of the last process
    detect_s: float = 10.0  # until a silent host counts as lost
    repair_s: float = HOUR_S
    exceptions: float = 0.1  # the share of failures after which the host remains


class Result(NamedTuple):
    goodput: float  # share of hosts x time spent in steps that were kept
    restart_s: float  # mean time from a failure to the next step, if no other failure is between
    starts: int
    failures: int
    hours: float
    cpu_s: float  # of policy and simulation, per start
    messages: float  # to and from hosts, per start
    end: str  # why the job ended early; "" if it ran until the end of the simulation


@dataclass(eq=False)
class Host:
    """A simulated host until its failure; for the controller a Member."""

    host: str
    is_first: bool = False
    nproc: int = 1
    alive: bool = True
    running: int = -1  # the number of its start; -1: none

    @property
    def base_rank(self) -> int:
        return 0 if self.is_first else -1


@dataclass
class Training:
    """The training of the group in one start."""

    began_s: float  # of its first step
    members: list[Host] = field(default_factory=list)
    active: bool = True


class World:
    """Simulated time and the events that are due in it: messages and failures of hosts."""

    def __init__(self, cluster: Cluster, failures: int, seed: int) -> None:
        self.cluster, self._failures_left, self._random = cluster, failures, random.Random(seed)
        self._now, self._order = 0.0, count()
        self.event_s = 0.0  # the time of the last event
        self._due: list[tuple[float, int, Host, dict | str | None]] = []
        self._training = Training(0.0, active=False)
        self._cut_s: float | None = None  # when training stopped
        self._tries = 0  # starts since then
        self._kept_s = self._reached_s = 0.0  # of training: in the newest checkpoint, and at the last failure
        self.useful_s, self.failures, self.starts, self.messages = 0.0, 0, 0, 0
        self.restarts_s: list[float] = []
        self.decided = ""  # by the controller, after the last failure
        for number in range(cluster.hosts + cluster.spares):
            self._schedule_join(Host(f"node-{number}", is_first=number == 0), 0.0)

    # -- the interface for the controller ------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def drop(self, host: Host) -> None:
        """Takes a host that does not answer for lost."""
        self.controller.lose(host, self._now)

    def log(self, line: str) -> None:
        """Discards the line."""

    def open_start(self, number: int, world_size: int) -> None:
        self.starts, self._tries = self.starts + 1, self._tries + 1
        began_s = self._now + self.cluster.start_s + world_size * self.cluster.meeting_s
        self._training = Training(began_s)

    def close_start(self) -> None:
        """Does nothing: the training has already stopped."""

    def send(self, host: Host, message: dict) -> None:
        """Sends a message of the controller to a host, which answers after a delay."""
        self.messages += 1
        self.decided = message.get("decided", self.decided)
        if not host.alive:
            self._training.active &= "start" not in message  # the others would wait for this host
            return
        if "start" in message:
            host.running = message["start"]
            self._training.members.append(host)
        elif message.get("end") == host.running >= 0:
            if message["polite"]:
                self._stop(saved=True)
            wait_s = self.cluster.end_s + (self.cluster.save_s if message["polite"] else 0.0)
            self._schedule(host, end_message(host.running, "preempted", int(self._kept_s)), wait_s)

    # -- the events of hosts ----------------------------------------------------------------------------

    def fail(self, host: Host, gone: bool) -> None:
        """The host is lost (`gone`), or one of its ranks fails; the others wait in their collectives."""
        if not host.alive:
            return
        self.failures += 1
        if host.running >= 0:
            self._reached_s = self._kept_s + self._trained()
            self._stop(saved=False)
        if gone:
            host.alive = False
            self._schedule(host, None, self.cluster.detect_s)
            self._schedule_join(Host(host.host, nproc=host.nproc), self.cluster.repair_s)
            return
        self._schedule_failure(host)
        if host.running >= 0:
            error = ErrorRecord(1, "OSError", f"failure {self.failures}", exit_code=EXIT_USER_ERROR)
            error.at_monotonic_s = time.monotonic()
            self._schedule(host, end_message(host.running, "failed", int(self._reached_s), error), 0.0)

    def next(self, until_s: float, controller: Controller) -> None:
        """Passes the next event, or the time `until_s` if none is due, to the controller. Raises: Done."""
        while self._due and self._due[0][0] <= until_s:
            at_s, _, host, what = heapq.heappop(self._due)
            self._now = self.event_s = max(self._now, at_s)
            if what == "fails":
                if self._failures_left > 0:
                    self._failures_left -= 1
                    self.fail(host, gone=self._random.random() >= self.cluster.exceptions)
            elif what is None or host.alive:
                self.messages += 1
                if isinstance(what, dict):
                    if host.running != what["ended"]:
                        continue  # it has already reported the end of this start
                    host.running = -1
                    controller.hear(host, what, self._now)
                elif what is None:
                    controller.lose(host, self._now)
                else:
                    controller.join(host, self._now)
                return
        if not self._failures_left:
            raise Done
        self._now = until_s
        controller.act(self._now)

    def _schedule_join(self, host: Host, after_s: float) -> None:
        self._schedule(host, "joins", after_s)
        if not host.is_first:
            self._schedule_failure(host, after_s)

    def _schedule_failure(self, host: Host, after_s: float = 0.0) -> None:
        self._schedule(host, "fails", after_s + self._random.expovariate(1 / self.cluster.mtbf_s))

    def _schedule(self, host: Host, what: dict | str | None, after_s: float) -> None:
        heapq.heappush(self._due, (self._now + after_s, next(self._order), host, what))

    def _stop(self, saved: bool) -> None:
        """Stops training now; the steps since the last save are lost unless `saved`."""
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
        """Ends the simulation; the steps of the current start count as saved."""
        self._stop(saved=True)

    def _trained(self, whole: bool = False) -> float:
        """Seconds of training in this start; `whole`: without those after its last save."""
        cluster = self.cluster
        ran_s = max(0.0, self._now - self._training.began_s)
        saves, rest_s = divmod(ran_s, cluster.every_s + cluster.save_s)
        return saves * cluster.every_s + (0.0 if whole else min(rest_s, cluster.every_s))


class Done(Exception):
    """All failures have happened."""


def simulate(cluster: Cluster, failures: int, seed: int = 0) -> Result:
    """The result of a job whose hosts and spares fail `failures` times in all."""
    world = World(cluster, failures, seed)
    size, budget = Size(cluster.low, cluster.hosts), Budget(10**9)
    controller = Controller(size, 1e9, budget, world.now(), world)
    began, end = time.process_time(), ""
    try:
        while controller.end is None:
            step_s = TICK_S if world.now() < world.event_s + BUSY_S else IDLE_S
            world.next(world.now() + step_s, controller)
        end = controller.end["why"] or world.decided
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
    parser.add_argument("--quick", action="store_true", help="64 hosts, few failures, to test the program")
    args = parser.parse_args()
    if args.quick:
        args.hosts, args.failures = [64], 60
    print(HEAD)
    for hosts in args.hosts:
        for row in rows(hosts, args.mtbf_hours * HOUR_S, args.failures, args.seed):
            print(row, flush=True)


HEAD = """| hosts | what | goodput | predicted | restart | CPU time per start | messages per start |
| ---: | --- | ---: | ---: | ---: | ---: | ---: |"""


def rows(hosts: int, mtbf_s: float, failures: int, seed: int) -> Iterator[str]:
    """Three save intervals with a fixed number of hosts and enough spares; then a varying number of hosts."""
    whole = Cluster(hosts, 0, mtbf_s, 0.0)
    best_s = save_every_s(whole.save_s, mtbf_s / hosts)
    spares = max(8, round(4 * hosts * whole.repair_s / mtbf_s))
    for factor, what in ((1.0, "Daly's interval"), (0.4, "2.5 times as often"), (2.5, "2.5 times as seldom")):
        cluster = replace(whole, spares=spares, low=hosts, every_s=factor * best_s)
        found = simulate(cluster, failures, seed)
        share = goodput(cluster.every_s, cluster.save_s, found.restart_s, mtbf_s / hosts)
        yield line(hosts, f"{what}: {cluster.every_s / 60:.0f} min, {spares} spares", found, f"{share:.1%}")
    found = simulate(replace(whole, every_s=best_s, low=1), failures, seed)
    yield line(hosts, "no spares: fewer hosts until one is repaired", found, "")


def line(hosts: int, what: str, found: Result, formula: str) -> str:
    what += f"; ended: {found.end}" if found.end else ""
    numbers = f"{found.restart_s:.0f} s | {1e3 * found.cpu_s:.1f} ms | {found.messages:,.0f}"
    return f"| {hosts:,} | {what} | {found.goodput:.1%} | {formula} | {numbers} |"


if __name__ == "__main__":
    main()
