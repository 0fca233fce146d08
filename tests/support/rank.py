"""A small training program that fails on request: FAULT="what:rank:step" in the environment.

KIND=jax uses gloo collectives through jax; KIND=light only joins and reports progress, and starts in 0.2 s.
Each start has the next fault of FAULT, a list that is read FAULT_STARTS times (default 1): later starts
succeed. A fault may name a path instead of a step: it happens once that file exists. UNTIL=path ends the
training likewise on all ranks.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cyxjax.errors import CheckpointError
from cyxjax.launch import heartbeat
from cyxjax.launch.clusters import discover
from cyxjax.launch.connect import connect, disconnect
from cyxjax.launch.environment import prepare
from cyxjax.launch.failure import hooks as exits
from cyxjax.launch.group import client
from cyxjax.launch.heartbeat import report_progress as tell

STEPS = int(os.environ.get("STEPS", "8"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))
UNTIL = os.environ.get("UNTIL")


class Stop(Exception):
    """Requests that training ends after a good save."""


def slow_loader():
    time.sleep(1000)


def hold_the_gil():
    ctypes.PyDLL(None).sleep(1000)


def spin():
    while True:
        pass


def raise_in_thread():
    thread = threading.Thread(target=lambda: {}["no such key"])
    thread.start()
    thread.join()
    time.sleep(1000)


def start_a_grandchild():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    raise ValueError("left a child behind")


def run_out_of_memory():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    bytearray(2**33)


def raise_with_secret():
    raise ValueError("boom, api_key=hunter2")


def be_noisy():
    """Prints NOISE_MB (default 100) of lines, then a line of 3 MB."""
    for _ in range(int(os.environ.get("NOISE_MB", "100")) * 1024):
        sys.stdout.write("x" * 1023 + "\n")
    sys.stdout.write("#" * 3_000_000)


FAULTS = {
    "raise": raise_with_secret,
    "thread": raise_in_thread,
    "exit3": lambda: sys.exit(3),
    "exit0": lambda: sys.exit(0),
    "vanish": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "realtime": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "memory": run_out_of_memory,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": slow_loader,
    "gil": hold_the_gil,
    "spin": spin,
    "child": start_a_grandchild,
    "noise": be_noisy,
}


def maybe_fail(rank, step):
    faults = os.environ.get("FAULT", "").split() * int(os.environ.get("FAULT_STARTS", "1"))
    start = int(os.environ.get("RESTART_COUNT", "0"))
    if start >= len(faults):
        return
    what, ranks, at = faults[start].split(":")
    due = step == int(at) if at.isdigit() else Path(at).exists()
    if (ranks == "all" or str(rank) in ranks.split("+")) and due:
        FAULTS[what]()


def add_over_ranks(value):
    """The sum of `value` over all ranks, which wait for each other."""
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    return float(process_allgather(np.float32(value)).sum())


def train(topology, add):
    slow = os.environ.get("SLOW_RANK") == str(topology.rank)
    total = 0.0
    for number in range(STEPS):
        tell(number, "data")
        time.sleep(STEP_S * (6 if slow else 1))
        maybe_fail(topology.rank, number)
        tell(number, "step")
        total = add(1)
        if number == 1:
            print("under way", flush=True)
        if UNTIL and add(Path(UNTIL).exists()):
            break
    print(f"finished {number + 1} steps, start {topology.restart_count}, total {total:g}", flush=True)


def main():
    topology = discover(os.environ)
    if os.environ.get("KIND") == "jax":
        prepare(topology)
        connect(topology)
        train(topology, add_over_ranks)
        disconnect()
        return
    hooks = exits.install(topology.rank, topology.restart_count, os.environ)
    heartbeat.start(os.environ)
    member = client.join(topology, {"config": os.environ.get(f"CONFIG_{topology.rank}", "same")})
    hooks.report = member.fail
    member.watch(hooks.lose)
    tell(-1, "idle")
    train(topology, lambda value: float(value * topology.world_size))
    tell(STEPS, "done")
    member.wait_until_all_are_done(60)
    member.leave()


def raising(error):
    """A signal handler that raises `error`."""

    def handle(number, frame):
        raise error

    return handle


if __name__ == "__main__":
    handlers = {
        "save": raising(Stop()),
        "fail to save": raising(CheckpointError("no room for step 7")),
        "raise": raising(KeyError("export")),
        "ignore": signal.SIG_IGN,
    }
    signal.signal(signal.SIGTERM, handlers.get(os.environ.get("ON_TERM", ""), signal.SIG_DFL))
    if os.environ.get("ON_TERM") == "save":
        signal.signal(signal.SIGUSR1, lambda number, frame: print("asked to save", flush=True))
    try:
        main()
    except Stop:
        print("saved", flush=True)
        os._exit(143)
