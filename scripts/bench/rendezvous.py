"""Time in which 1,000 ranks on one machine join a group, and in which all are notified of a death.

    python scripts/bench/rendezvous.py [--ranks 1000] [--turns 3]
    python scripts/bench/rendezvous.py --quick     # 24 ranks, once, as a test

This process runs only the launcher's server. The ranks are threads of 8 other processes; each has its own
socket and runs the code of real ranks (`client.join`). All ranks join at the same time. Then one rank closes
its connection, the others are notified, and all processes are killed. CPU time is that of the server; wall
time includes the work of the ranks, because they share this machine.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cyxjax.launch.group import client, ports
from cyxjax.launch.group.client import GroupConnection
from cyxjax.launch.group.rendezvous import Rendezvous
from cyxjax.launch.group.server import GroupServer
from cyxjax.launch.topology import Topology

PROCESSES = 8
LIMIT_S = 120.0
TOKEN = "of a benchmark"


class Turn(NamedTuple):
    """(wall seconds, CPU seconds of the server) until all have joined, are notified of a death, are gone."""

    met: tuple[float, float]
    told: tuple[float, float]
    gone: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="24 ranks, once, to test the program")
    parser.add_argument("--part", type=json.loads, help="[port, ranks, first, end]: run those ranks")
    args = parser.parse_args()
    if args.part:
        be_ranks(*args.part)
        return
    if args.quick:
        args.ranks, args.turns = 24, 1
    print(table(args.ranks, [turn(args.ranks) for _ in range(args.turns)]))


def turn(ranks: int) -> Turn:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * ranks + 256)), hard))
    with parts(ranks) as (meeting, children):
        for child in children:
            receive(child, "ready")
        began, cpu = time.monotonic(), time.process_time()
        for child in children:
            send(child, "go")
        met_s = max(receive(child, "met") for child in children) - began
        met_cpu, cpu = time.process_time() - cpu, time.process_time()
        send(children[-1], "die")
        broke = receive(children[-1], "broke")
        told_s = max(receive(child, "told") for child in children) - broke
        told_cpu, cpu, began = time.process_time() - cpu, time.process_time(), time.monotonic()
        for child in children:
            child.kill()
        while meeting.here and time.monotonic() < began + LIMIT_S:
            time.sleep(0.02)
        gone = time.monotonic() - began, time.process_time() - cpu
        return Turn((met_s, met_cpu), (told_s, told_cpu), gone)


@contextmanager
def parts(ranks: int) -> Iterator[tuple[Rendezvous, list[subprocess.Popen]]]:
    """The rendezvous of `ranks` ranks, and the processes that run them; all are ended afterwards."""
    listener = ports.listen("127.0.0.1", 0)
    server = GroupServer(listener, TOKEN, lambda line: None)
    coordinator = {"address": "127.0.0.1:1"}
    server.ranks = meeting = Rendezvous(ranks, lambda: coordinator, server, lambda line: None, run_id="bench")
    server.start()
    edges = [ranks * n // PROCESSES for n in range(PROCESSES + 1)]
    places = [[listener.getsockname()[1], ranks, *edges[n : n + 2]] for n in range(PROCESSES)]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--part", json.dumps(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        for place in places
    ]
    watchdog = threading.Timer(LIMIT_S, lambda: [child.kill() for child in children])
    watchdog.start()
    try:
        yield meeting, children
    finally:
        watchdog.cancel()
        for child in children:
            child.kill()
            child.communicate()
        server.close()
        listener.close()


def be_ranks(port: int, ranks: int, first: int, end: int) -> None:
    """Runs ranks `first` to `end` - 1 of the group, one thread each, at the parent's commands."""
    members: list[GroupConnection] = []
    notified = threading.Semaphore(0)
    client.versions()  # loads modules, outside of the measured time
    print("ready 0", flush=True)
    sys.stdin.readline()

    def join(rank: int) -> None:
        place = {"master_port": port, "timeout_ms": int(1e3 * LIMIT_S), "hosted": True}
        topology = Topology(rank, ranks, run_id="bench", token=TOKEN, **place)
        members.append(client.join(topology, log=lambda line: None))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(first, end)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(members) == end - first
    print(f"met {time.monotonic()}", flush=True)
    dies = [members.pop()] if end == ranks else []
    for member in members:
        member.watch(lambda why: notified.release())
    if dies:
        sys.stdin.readline()
        dies[0]._channel.socket.shutdown(socket.SHUT_RDWR)  # as the end of a process does
        print(f"broke {time.monotonic()}", flush=True)
    for _ in members:
        notified.acquire()
    print(f"told {time.monotonic()}", flush=True)
    sys.stdin.readline()
    os._exit(0)


def send(child: subprocess.Popen, word: str) -> None:
    assert child.stdin
    child.stdin.write(f"{word}\n")
    child.stdin.flush()


def receive(child: subprocess.Popen, word: str) -> float:
    """The time (s) that the child prints after `word`. Raises: RuntimeError if it prints anything else."""
    assert child.stdout
    reply = child.stdout.readline().split()
    if not reply or reply[0] != word:
        raise RuntimeError(f"expected {word!r} from a process of ranks, got {reply} (it has {LIMIT_S:g} s)")
    return float(reply[1])


def table(ranks: int, turns: list[Turn]) -> str:
    """Markdown: medians."""
    rows = (f"{ranks:,} ranks meet", "all are notified of a death", "all others die and are removed")
    lines = ["| | wall | CPU time of the server |", "| --- | ---: | ---: |"]
    for row, values in zip(rows, zip(*turns, strict=True), strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        lines.append(f"| {row} | {wall:.2f} s | {cpu:.2f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
