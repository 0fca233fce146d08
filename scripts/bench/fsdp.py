"""Throughput and memory of fsdp, ZeRO-2, zero1 and mean, and of torch's DDP and FSDP2, on CPUs over gloo.

    python scripts/bench/fsdp.py [--ranks 2] [--rounds 5] [--seconds 3] [--torch-python PATH] [--layers 12]
    python scripts/bench/fsdp.py --quick    # one round of a GPT of 2 layers, a few steps, as a test

Trains a GPT in rounds; each round starts every row in new processes, so that other load slows all rows alike.
Prints a Markdown table of medians: tokens/s of all ranks, tokens/s relative to `mean` in the same round, CPU
seconds per step of rank 0, and its peak memory (with the interpreter and its libraries). A round does not
start if the longest round so far would exceed --limit-s (330 s). `--write` puts the table into README.md
beside this file. Measure on an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers import free_port, machine, output_of, write

HERE = Path(__file__).parent
OURS = {
    "mean": ["mean", {}],
    "zero1": ["zero1", {}],
    "fsdp": ["fsdp", {}],
    "fsdp, regather: false": ["fsdp", {"regather": False}],
}
TORCH = {"torch DDP": ["mean", {}], "torch FSDP2": ["fsdp", {}]}
SIZES = {"layers": 12, "width": 256, "heads": 4, "length": 64, "vocab": 256, "batch": 4}
QUICK = {"layers": 2, "width": 64, "heads": 2, "length": 32, "vocab": 64, "batch": 2}
_LIMIT_S = 120  # per row


def main() -> int:
    args = parse()
    rows: dict[str, tuple[Any, ...]] = {
        row: (sys.executable, "fsdp_ours.py", *what) for row, what in OURS.items()
    }
    if args.torch_python:
        rows |= {row: (args.torch_python, "fsdp_torch.py", *what) for row, what in TORCH.items()}
    found: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    until, longest_s = time.monotonic() + args.limit_s, 0.0
    for number in range(args.rounds):
        begun = time.monotonic()
        if number and begun + longest_s > until:
            break
        for row, (python, script, comm, options) in rows.items():
            task = {name: getattr(args, name) for name in (*SIZES, "seconds")}
            task |= {"comm": comm, "options": options}
            result = measure([python, str(HERE / script), json.dumps(task)], args.ranks)
            found[row].append(result)
            print(f"round {number + 1}, {row}: {result}", file=sys.stderr, flush=True)
        longest_s = max(longest_s, time.monotonic() - begun)
    text = f"{heading(args, len(found['mean']))}\n\n{table(found)}"
    print(text)
    if args.write:
        write(HERE / "README.md", text, "fsdp")
    return 0 if all(result for results in found.values() for result in results) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time per row and round")
    parser.add_argument("--limit-s", type=float, default=330.0, help="limit of all rounds together")
    parser.add_argument("--torch-python", help="a Python with torch; without it no torch rows")
    parser.add_argument("--write", action="store_true", help="write the table to README.md beside this file")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, to test the program")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick gives no valid measurement for --write. HINT: omit one of the two.")
    if args.quick:
        vars(args).update(QUICK, rounds=1, seconds=0.2)
    return args


def heading(args: argparse.Namespace, rounds: int) -> str:
    return (
        f"{machine()}; {args.ranks} processes over gloo, {rounds} rounds, medians. "
        f"GPT of {args.layers} layers of {args.width}, {args.heads} heads, "
        f"{args.batch} texts of {args.length} a process."
    )


def measure(command: list[str], ranks: int) -> dict[str, float]:
    """The numbers that rank 0 prints, or {} if the ranks do not finish; kills all processes at the end."""
    port = free_port()
    out = output_of([start(rank, ranks, port, command) for rank in range(ranks)], _LIMIT_S)
    lines = [line for line in out.splitlines() if line.startswith('{"')]
    return json.loads(lines[-1]) if lines else {}


def start(rank: int, ranks: int, port: str, command: list[str]) -> subprocess.Popen:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(
        command, env={**os.environ, **place}, stdout=output, text=True, start_new_session=True
    )


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown; a row omits the rounds in which it or `mean` has no result."""
    lines = ["| | tokens/s | of mean | CPU s a step | peak MB | parameters |", "| --- |" + " ---: |" * 5]
    for row, results in found.items():
        pairs = [(one, mean) for one, mean in zip(results, found["mean"], strict=True) if one and mean]
        if not pairs:
            lines.append(f"| {row} | no result |  |  |  |  |")
            continue
        of = lambda name: statistics.median(one[name] for one, _ in pairs)  # noqa: B023, E731
        share = statistics.median(one["tokens_per_s"] / mean["tokens_per_s"] for one, mean in pairs)
        cells = f"{of('tokens_per_s'):,.0f} | {share:.2f} | {of('cpu_s'):.3f} | {of('peak_mb'):,.0f}"
        lines.append(f"| {row} | {cells} | {of('params') / 1e6:.2f} M |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
