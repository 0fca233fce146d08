"""Throughput, system time, page faults and memory of CPU training, for each choice of `--pages`.

    python scripts/bench/pages.py [--works wide_mlp gpt] [--turns 3] [--json FILE]

The choices alternate in turns; each is a whole `fit`. Prints medians: samples/s of all ranks, and of rank 0
system time (ms) and page faults per step and the peak of resident memory. `--json` adds to
the results in FILE, so that a table can be measured in parts.
"""

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from peers import machine, run, shown
from peers_flax import model
from peers_work import WORKS, data

import cyxjax as cx
from cyxjax.launch.backend import pages

CHOICES = [word for word in pages.WORDS if word != pages.AUTO]
STEPS = {"mlp": 3000, "wide_mlp": 150, "cnn": 80, "digits": 1200, "resnet18": 8, "gpt": 30}
COLUMNS = ("samples_per_s", "wall_ms", "system_ms", "faults", "peak_mb")


def main() -> int:
    args = parse()
    if args.cell:
        cell(args.cell)
        return 0
    kept = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}
    for _ in range(args.turns):
        for work in args.works:
            for processes in args.replicas:
                for word in CHOICES:
                    found = measured(work, processes, word)
                    print(work, processes, word, found, file=sys.stderr)
                    if isinstance(found, dict):
                        kept.setdefault(f"{work} {processes} {word}", []).append(found)
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")
    print(table(kept))
    return 0 if kept else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--replicas", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", help="add the numbers of every turn to this file")
    parser.add_argument("--cell", choices=STEPS, help="measure one cell in this rank, print JSON")
    return parser.parse_args()


def measured(work: str, processes: int, word: str) -> dict[str, float] | str:
    """The numbers that rank 0 of one job prints; without them the last line of its errors."""
    launcher = ["-m", "cyxjax.launch", "--nproc-per-node", str(processes), "--pages", word]
    out, errors = run([sys.executable, *launcher, __file__, "--cell", work], 1)
    for line in out.splitlines():
        if (at := line.find("{")) >= 0:  # after the rank, which the launcher prepends
            return json.loads(line[at:])
    return (errors.strip().splitlines() or ["no result"])[-1]


def cell(work: str) -> None:
    """Trains this rank's part of `work`; rank 0 prints the numbers as JSON."""
    cx.distributed.init()
    (x, y), steps, warm = data(work), STEPS[work], 8
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = cx.DistributedTrainer(model(work), cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-3))
        config = cx.TrainingConfig(
            epochs=10**6, batch_size=WORKS[work].batch, max_steps=warm, checkpoint_dir=folder, resume="never"
        )
        trainer.fit(x, y, config)  # compiles
        config.max_steps = steps
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        trainer.fit(x, y, config)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    rows = steps * WORKS[work].batch * cx.distributed.get_world_size()
    numbers = (
        rows / seconds,
        1e3 * seconds / steps,
        1e3 * (after.ru_stime - before.ru_stime) / steps,
        (after.ru_minflt - before.ru_minflt) / steps,
        after.ru_maxrss / 1024,
    )
    if trainer.is_master():
        print(json.dumps(dict(zip(COLUMNS, numbers, strict=True))), flush=True)


def table(kept: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: one row per work and number of processes, one column per choice."""
    lines = [
        f"{machine()}; `python scripts/bench/pages.py`. Each cell: samples/s, ms of system time per step, "
        "page faults per step, peak in MB; medians.",
        "",
        f"| work | {' | '.join(CHOICES)} |",
        f"| --- |{' --- |' * len(CHOICES)}",
    ]
    for row in dict.fromkeys(key.rpartition(" ")[0] for key in kept):
        turns = [kept.get(f"{row} {word}", []) for word in CHOICES]
        lines.append(f"| {row.replace(' ', ' x ')} | {' | '.join(map(of_cell, turns))} |")
    return "\n".join(lines)


def of_cell(turns: list[dict[str, float]]) -> str:
    if not turns:
        return ""
    middle = {name: statistics.median(turn[name] for turn in turns) for name in COLUMNS}
    return (
        f"{shown(middle['samples_per_s'])}; {middle['system_ms']:.2f}; {middle['faults']:,.0f}; "
        f"{middle['peak_mb']:,.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
