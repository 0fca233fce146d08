"""Samples per second of each strategy, and of torch DDP, between two hosts on a slow network.

    sudo python scripts/bench/comm.py [--rates 1gbit 100mbit] [--seconds 4] [--torch-python PATH] [--only ROW]
    sudo python scripts/bench/comm.py --cut    # a split backward pass: does its all-reduce overlap it?

Two network namespaces stand for two hosts; tc limits the pair of interfaces that connects them. An MLP of
5.8 M parameters trains in two processes with one core each. Prints a Markdown table and removes the
namespaces. Needs root, iproute2 and Linux; without them it prints what is missing and exits with code 0.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers import output_of

HERE = Path(__file__).parent
HOSTS = ("cyxbench0", "cyxbench1")
ADDRESSES = ("10.77.91.1", "10.77.91.2")
OURS = {  # row -> [strategy, options]
    "mean": ["mean", {}],
    "bucketed 25 MB": ["bucketed", {"bucket_size_mb": 25}],
    "zero1": ["zero1", {}],
    "fp16": ["fp16", {}],
    "bf16": ["bf16", {}],
    "int8": ["int8", {}],
    "power_sgd rank 4": ["power_sgd", {"rank": 4, "start_iter": 0}],
    "local_sgd every 8": ["local_sgd", {"every": 8}],
    "diloco every 50": ["diloco", {"every": 50}],
}
TORCH = {
    "torch DDP": ["plain", {}],
    "torch DDP, fp16 hook": ["fp16", {}],
    "torch DDP, bf16 hook": ["bf16", {}],
    "torch DDP, PowerSGD rank 4": ["power_sgd", {"rank": 4}],
}
CUT = dict.fromkeys(("one program", "no exchange", *(f"cut after layer {n}" for n in (2, 4, 6))))
_LIMIT_S = 300  # for one pair of processes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="in tc's notation")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per row")
    parser.add_argument("--batch", type=int, default=64, help="samples per process and step")
    parser.add_argument("--torch-python", help="a Python with torch; without it no torch rows")
    parser.add_argument("--only", default="", help="only rows whose name contains this, and mean")
    parser.add_argument("--cut", action="store_true", help="only steps with a backward pass split by depth")
    args = parser.parse_args()
    if missing := what_is_missing():
        print(f"skipped: {missing}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `two_hosts` removes the namespaces
    results: dict[str, dict[str, float | str]] = {}
    for rate in args.rates:
        with two_hosts(rate):
            rows, script = (CUT, "comm_cut.py") if args.cut else (OURS, "comm_ours.py")
            found = measure(sys.executable, script, rows, args)
            if args.torch_python and not args.cut:
                found |= measure(args.torch_python, "comm_torch.py", TORCH, args)
        for row, value in found.items():
            results.setdefault(row, {})[rate] = value
        print(f"{rate}: {found}", file=sys.stderr)
    print(table(results, args.rates))
    return 0


def what_is_missing() -> str:
    """The reason why the benchmark cannot run on this machine, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root. HINT: run it with sudo."
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not found. HINT: install iproute2." if absent else ""


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Two namespaces, connected with bandwidth `rate` in each direction; always removed afterwards."""
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
            run("ip", "-n", host, "link", "set", "lo", "up")
        run("ip", "link", "add", "wire0", "netns", HOSTS[0], "type", "veth",
            "peer", "name", "wire1", "netns", HOSTS[1])  # fmt: skip
        for i, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", f"wire{i}")
            run("ip", "-n", host, "link", "set", f"wire{i}", "up")
            # A queue of 20 ms: long enough for TCP to use the full bandwidth, and still a short delay.
            run("tc", "-n", host, "qdisc", "add", "dev", f"wire{i}", "root",
                "tbf", "rate", rate, "burst", "256kb", "latency", "20ms")  # fmt: skip
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def measure(
    python: str, script: str, rows: dict[str, Any], args: argparse.Namespace
) -> dict[str, float | str]:
    """Samples/s by row, or the reason for no result, from a pair of processes that run `script`."""
    rows = {row: what for row, what in rows.items() if row == "mean" or args.only in row}
    task = json.dumps({"rows": rows, "seconds": args.seconds, "batch": args.batch})
    out = output_of([start(rank, [python, str(HERE / script), task]) for rank in range(2)], _LIMIT_S)
    found = dict(json.loads(line) for line in out.splitlines() if line.startswith('["'))
    return {row: found.get(row, "no result") for row in rows}


def start(rank: int, command: list[str]) -> subprocess.Popen:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": f"wire{rank}",
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    inside = [
        "ip",
        "netns",
        "exec",
        HOSTS[rank],
        "taskset",
        "-c",
        str(rank % (os.cpu_count() or 1)),
        *command,
    ]
    output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(
        inside, env={**os.environ, **place}, stdout=output, text=True, start_new_session=True
    )


def table(results: dict[str, dict[str, float | str]], rates: list[str]) -> str:
    """Markdown: samples/s and, in brackets, the ratio to the first row; one column per rate."""
    lines = [f"| samples/s | {' | '.join(rates)} |", f"| --- |{' ---: |' * len(rates)}"]
    first = next(iter(results.values()))
    for row, values in results.items():
        cells = []
        for rate in rates:
            value, plain = values.get(rate, "no result"), first[rate]
            known = isinstance(value, float) and isinstance(plain, float)
            cells.append(f"{value:,.0f} ({value / plain:.1f}x)" if known else str(value))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
