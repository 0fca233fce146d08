"""Errors of `cyxjax plan`, compared with real runs of 1, 2 and 4 processes on this machine.

    python scripts/bench/plan.py [--works mlp wide_mlp cnn] [--write]
    python scripts/bench/plan.py --quick      # a few steps of one work, as a test

First measures the network between two processes (all-reduces of one number and of 4 MiB). `cyxjax plan`, in
one process with one thread, then predicts each row before its run; with more processes than cores, its
compute time is multiplied by processes / cores. A real run uses the launcher, `cyxjax.train` and the same
configuration; its step time is the median time per epoch, without the first, divided by the steps per epoch.
`--write` puts the table into README.md beside this file.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import peers
from peers_work import WORKS

HERE = Path(__file__).parent
COMMS = {"wide_mlp": ("mean", "bf16", "int8", "zero1", "fsdp")}  # for other works: SOME
SOME = ("mean", "zero1")
PROCESSES = (1, 2, 4)
EPOCHS, QUICK_EPOCHS = 6, 2
_LARGE = 1 << 22  # bytes
Row = tuple[str, str, int, float, float]  # work, comm, processes, predicted s, measured s


def main() -> int:
    args = parse()
    wire = measured_wire()
    print(f"link: {wire['bytes_per_s'] / 1e6:,.0f} MB/s, {1e6 * wire['latency_s']:.0f} us", file=sys.stderr)
    rows: list[Row] = []
    for work in args.works:
        plan = predicted(work, wire)
        for processes in args.processes:
            for comm in ("mean",) if processes == 1 or args.quick else COMMS.get(work, SOME):
                guess = plan["step_s"][str(processes)][comm] + waiting_for_cores(plan, processes)
                rows.append((work, comm, processes, guess, step_s(work, comm, processes, args)))
                print(*map(str, rows[-1]), file=sys.stderr)
    text = table(rows)
    print(text)
    if args.write:
        peers.write(
            HERE / "README.md", f"{peers.machine()}; `python scripts/bench/plan.py`.\n\n{text}", "plan"
        )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["mlp", "wide_mlp", "cnn"])
    parser.add_argument("--processes", nargs="+", type=int, choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--write", action="store_true", help="write the table to README.md beside this file")
    parser.add_argument("--quick", action="store_true", help="few steps of one work, to test the program")
    args = parser.parse_args()
    if args.quick:
        args.works, args.processes = ["mlp"], [1, 2]
    if args.quick and args.write:
        parser.error("--write needs the whole measurement. HINT: omit --quick.")
    return args


def measured_wire() -> dict[str, float]:
    """Bytes per second and latency (s) of all-reduces of two processes: t(n) = 2 latency + n / rate."""
    small_s, large_s = told(launched(2, str(HERE / "plan_wire.py"), str(_LARGE)))["seconds"]
    return {"bytes_per_s": _LARGE / max(large_s - small_s, 1e-9), "latency_s": small_s / 2}


def predicted(work: str, wire: dict[str, float]) -> dict:
    """The output of `cyxjax plan --json` for the work."""
    words = ["--bandwidth", f"{wire['bytes_per_s'] * 8 / 1e6:.6f}Mbit", "--replicas", "1:4", "--json"]
    words += ["--latency", f"{1e6 * wire['latency_s']:.6f}us"]
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), work, "mean")
        cli = "import sys; from cyxjax.cli.main import main; sys.exit(main(sys.argv[1:]))"
        return told(run([sys.executable, "-c", cli, "plan", "--config", str(config), *words]))


def waiting_for_cores(plan: dict, processes: int) -> float:
    """Seconds by which a step takes longer because processes share cores."""
    return plan["compute_s"] * max(0.0, processes / (os.cpu_count() or 1) - 1)


def step_s(work: str, comm: str, processes: int, args: argparse.Namespace) -> float:
    """Seconds per step of a real run, from the median epoch without the first, which compiles."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), work, comm)
        words = ["-m", "cyxjax.train", "--config", str(config)]
        launched(processes, *words, "--epochs", str(QUICK_EPOCHS if args.quick else EPOCHS))
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").open()]
    epochs = [record["seconds"] for record in records if "seconds" in record]
    steps = math.ceil(WORKS[work].rows / (WORKS[work].batch * processes))
    return statistics.median(epochs[1:]) / steps


def write_config(folder: Path, work: str, comm: str) -> Path:
    """The path of the experiment's configuration, without evaluation and saves: only steps are timed."""
    config = {
        "run_dir": str(folder / "run"),
        "model": {"name": "peers_flax:model", "options": {"work": work}},
        "data": {"name": "plan_work:data", "options": {"work": work}},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "loss": "cross_entropy",
        "batch_size": WORKS[work].batch,
        "comm": comm,
        "evaluate_every_n_epochs": 0,
        "checkpoint_every_n_epochs": 0,
        "sinks": ["jsonl"],
        "report": False,
    }
    path = folder / "config.yaml"  # JSON is YAML
    path.write_text(json.dumps(config))
    return path


def launched(processes: int, *words: str) -> str:
    return run([sys.executable, "-m", "cyxjax.launch", "--nproc-per-node", str(processes), *words])


def run(command: list[str]) -> str:
    """The output of `command`, run with one thread per process. Exits the benchmark if it fails."""
    os.environ |= {"NPROC": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE)}
    out, errors = peers.run(command, devices=1)
    if not out or "Traceback" in errors:
        sys.exit(f"{' '.join(command)}\n{errors[-2000:]}")
    return out


def told(out: str) -> dict:
    """The JSON object in the last line of `out`, after the rank, which the launcher prepends."""
    line = out.splitlines()[-1]
    return json.loads(line[line.index("{") :])


def table(rows: list[Row]) -> str:
    """Markdown: one line per row."""
    lines = ["| work | comm | processes | predicted | measured | off by |", "| --- | --- |" + " ---: |" * 4]
    for work, comm, processes, guess, real in rows:
        off = f"{guess / real - 1:+.0%}"
        lines.append(
            f"| {work} | {comm} | {processes} | {1e3 * guess:.2f} ms | {1e3 * real:.2f} ms | {off} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
