"""How long a thousand ranks take to meet, on one machine, and to hear of a death.

    python scripts/bench/rendezvous.py [--ranks 1000] [--turns 3]
    python scripts/bench/rendezvous.py --quick     # 24 ranks, once: proves that it runs

The server is the launcher's, in this process, and does nothing else; the ranks are threads of a few
other processes, each with a socket of its own and the code that real ranks run (`client.join`). They all
come at once. Then the process of one breaks off its connection, the others hear of it, and die too. CPU time
is the server's alone; wall time has that of the ranks in it, since they share this machine.
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
from cyxjax.launch.group.rendezvous import Job, Rendezvous
from cyxjax.launch.group.server import GroupServer
from cyxjax.launch.topology import Topology

PROCESSES = 8
LIMIT_S = 120.0
TOKEN = "of a benchmark"


class Turn(NamedTuple):
    """Wall seconds, and those of CPU time of the server: until all have met, have heard, have gone."""

    met: tuple[float, float]
    told: tuple[float, float]
    gone: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="24 ranks, once: proves that it runs")
    parser.add_argument("--part", type=json.loads, help="[port, ranks, first, end]: those, in this process")
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
            hear(child, "ready")
        began, cpu = time.monotonic(), time.process_time()
        for child in children:
            say(child, "go")
        met_s = max(hear(child, "met") for child in children) - began
        met_cpu, cpu = time.process_time() - cpu, time.process_time()
        say(children[-1], "die")
        broke = hear(children[-1], "broke")
        told_s = max(hear(child, "told") for child in children) - broke
        told_cpu, cpu, began = time.process_time() - cpu, time.process_time(), time.monotonic()
        for child in children:
            child.kill()
        while meeting.here and time.monotonic() < began + LIMIT_S:
            time.sleep(0.02)
        gone = time.monotonic() - began, time.process_time() - cpu
        return Turn((met_s, met_cpu), (told_s, told_cpu), gone)


@contextmanager
def parts(ranks: int) -> Iterator[tuple[Rendezvous, list[subprocess.Popen]]]:
    """The meeting of so many, and the processes that hold them; all of it gone afterwards."""
    listener = ports.listen("127.0.0.1", 0)
    server = GroupServer(listener, TOKEN, lambda line: None)
    job = Job(ranks, "bench", timeout_s=LIMIT_S)
    server.ranks = meeting = Rendezvous(
        job, lambda job: {"address": "127.0.0.1:1"}, server, lambda line: None
    )
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
    """Ranks `first` to `end` - 1 of one group, a thread each; does what the parent says."""
    members: list[GroupConnection] = []
    heard = threading.Semaphore(0)
    client.versions()  # loads what it reads from
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
        member.watch(lambda why: heard.release())
    if dies:
        sys.stdin.readline()
        dies[0]._channel.socket.shutdown(socket.SHUT_RDWR)  # as the end of its process does
        print(f"broke {time.monotonic()}", flush=True)
    for _ in members:
        heard.acquire()
    print(f"told {time.monotonic()}", flush=True)
    sys.stdin.readline()
    os._exit(0)


def say(child: subprocess.Popen, word: str) -> None:
    assert child.stdin
    child.stdin.write(f"{word}\n")
    child.stdin.flush()


def hear(child: subprocess.Popen, word: str) -> float:
    """When it happened. Raises: RuntimeError when the child says something else, or has ended."""
    assert child.stdout
    said = child.stdout.readline().split()
    if not said or said[0] != word:
        raise RuntimeError(f"expected {word!r} from a process of ranks, got {said} (it has {LIMIT_S:g} s)")
    return float(said[1])


def table(ranks: int, turns: list[Turn]) -> str:
    """Markdown: medians."""
    rows = (f"{ranks:,} ranks meet", "all have heard of a death", "all others die, and are seen to have gone")
    lines = ["| | wall | CPU time of the server |", "| --- | ---: | ---: |"]
    for row, values in zip(rows, zip(*turns, strict=True), strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        lines.append(f"| {row} | {wall:.2f} s | {cpu:.2f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
