"""Cost of `reproducibility: exact`: samples per second compared with `mean`, in alternating turns.

    python scripts/bench/exact.py [--write]     # under 15 minutes: 1x1, 1x2 and 2x1 processes x devices
    python scripts/bench/exact.py --quick --layouts 1x1 2x1  # one turn of MLP and GPT, as a test

The launcher starts each layout. Both alternatives run in the same process with the number of threads that an
exact run needs (--threads); `mean` also runs in a separate process with its default number of threads. A cell
is the median rate and, in brackets, how many times longer exact takes (the median over the turns, and their
range). `--write` puts the table into README.md beside this file. Measure on an idle machine.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
from peers import machine, write

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train.trainer import DistributedTrainer

HERE = Path(__file__).parent
# (model, global batch, steps per turn, parts). The most important come first: a layout has a time limit.
WORKS = (
    ("mlp", 64, 150, (8, 2, 4, 16)),
    ("mlp", 512, 40, (8, 2, 4, 16)),
    ("cnn", 64, 20, (8, 2)),
    ("gpt", 64, 20, (8, 2)),
    ("resnet18", 64, 3, (8,)),
    ("cnn", 512, 4, (8,)),
    ("gpt", 512, 4, (8,)),
)
QUICK = (("mlp", 64, 20, (8, 2)), ("gpt", 64, 4, (8,)))
PARTS = (2, 4, 8, 16)


def problem(name: str, rng: np.random.Generator, num_samples: int) -> tuple[Any, np.ndarray, np.ndarray]:
    labels = rng.integers(0, 10, num_samples).astype(np.int32)
    if name == "mlp":
        return cx.get_model("mlp")(), rng.normal(size=(num_samples, 784)).astype(np.float32), labels
    if name == "cnn":
        images = rng.normal(size=(num_samples, 28, 28, 1)).astype(np.float32)
        return cx.get_model("cnn")(), images, labels
    if name == "resnet18":
        images = rng.normal(size=(num_samples, 32, 32, 3)).astype(np.float32)
        return cx.get_model("resnet18")(small_images=True, width=16), images, labels
    tokens = rng.integers(0, 128, (num_samples, 32)).astype(np.int32)
    shape = {"vocab_size": 128, "context_length": 32, "width": 64, "num_heads": 4, "num_layers": 4}
    return cx.get_model("gpt")(**shape), tokens, tokens


def runner(name: str, batch: int, steps: int, **options: Any) -> Callable[[], float]:
    """A function that trains `steps` steps and returns samples per second; it is already compiled."""
    model, x, y = problem(name, np.random.default_rng(0), batch * steps)
    trainer = DistributedTrainer(model, cx.CrossEntropyLoss(), cx.AdamOptimizer(0.001))
    config = DistributedTrainingConfig(
        epochs=1, global_batch_size=batch, verbose=False, checkpoint_every_n_epochs=0, **options
    )

    def once() -> float:
        return trainer.fit(x, y, config).samples_per_second  # of the training loop

    once()
    return once


def main() -> None:
    given = parse()
    if given.child:
        measure(given)
        return
    rows: dict[tuple, dict] = {}
    end = time.monotonic() + 60 * given.minutes
    for index, layout in enumerate(given.layouts):
        share = (end - time.monotonic()) / (len(given.layouts) - index)
        for kind, part in (("plain", 0.2), ("pairs", 0.8)):
            for found in launched(layout, kind, given, share * part):
                row = rows.setdefault((found["model"], found["batch"], layout), {})
                row.setdefault(found["kind"], {})[found.get("parts", 0)] = found["rates"]
                print(layout, found, file=sys.stderr, flush=True)
    text = table(rows, given)
    print(text)
    if given.write:
        write(HERE / "README.md", text, "exact")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layouts", nargs="+", metavar="PxD", default=["1x1", "1x2", "2x1"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=14, help="limit; later cells remain empty")
    parser.add_argument("--quick", action="store_true", help="one turn of two works, to test the program")
    parser.add_argument("--write", action="store_true", help="write the table to README.md beside this file")
    parser.add_argument("--child", choices=("plain", "pairs"), help=argparse.SUPPRESS)
    parser.add_argument("--cpu-devices", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.turns = 1
    return given


def launched(layout: str, kind: str, given: argparse.Namespace, limit_s: float) -> Iterator[dict]:
    """The results of this script in `layout` (processes x devices per process); then kills its processes."""
    processes, devices = map(int, layout.split("x"))
    words = [sys.executable, "-m", "cyxjax.launch", "--nproc-per-node", str(processes), __file__]
    words += ["--child", kind, "--turns", str(given.turns), "--threads", str(given.threads)]
    words += ["--cpu-devices", str(processes * devices), *(["--quick"] if given.quick else [])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    timer = Timer(limit_s, end_of, [process])
    timer.start()
    try:
        for line in process.stdout or ():
            at = line.find('{"kind"')  # after the rank, which the launcher prepends
            if at >= 0:
                yield json.loads(line[at:])
    finally:
        timer.cancel()
        end_of(process)
        process.wait()


def end_of(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def measure(given: argparse.Namespace) -> None:
    """Prints one line of JSON per cell, on rank 0."""
    threads = given.threads if given.child == "pairs" else None
    group = cx.distributed.init(cpu_devices=given.cpu_devices, threads=threads)
    for model, batch, steps, every in QUICK if given.quick else WORKS:
        plain = runner(model, batch, steps)
        work = {"model": model, "batch": batch}
        if given.child == "plain":
            print_json(group, {"kind": "plain"} | work | {"rates": [plain() for _ in range(given.turns)]})
            continue
        for parts in every:
            options = {"virtual_replicas": parts, "exact_threads": given.threads}
            exact = runner(model, batch, steps, reproducibility="exact", **options)
            pairs = [(plain(), exact()) for _ in range(given.turns)]
            print_json(group, {"kind": "pairs"} | work | {"parts": parts, "rates": pairs})


def print_json(group: Any, found: dict) -> None:
    if group.topology.is_master:
        print(json.dumps(found), flush=True)


def table(rows: dict[tuple, dict], given: argparse.Namespace) -> str:
    """Markdown: one line per work and layout."""
    command = f"{machine()}; `python scripts/bench/exact.py`, {given.turns} turns, samples/s, medians."
    heads = ["mean", f"mean, {given.threads} threads", *(f"exact, {parts} parts" for parts in PARTS)]
    lines = [command, "", f"| work | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for (model, batch, layout), found in rows.items():
        pairs = found.get("pairs", {})
        same = [plain for each in pairs.values() for plain, _ in each]
        cells = [rate(found.get("plain", {}).get(0, [])), rate(same)]
        cells += [exact_cell(pairs.get(parts, [])) for parts in PARTS]
        lines.append(f"| {model}, batch {batch}, {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rate(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f}" if rates else ""


def exact_cell(pairs: list[tuple[float, float]]) -> str:
    if not pairs:
        return ""
    ratio = [plain / exact for plain, exact in pairs]
    spread = f"{statistics.median(ratio):.2f}x, {min(ratio):.2f} to {max(ratio):.2f}"
    return f"{rate([exact for _, exact in pairs])} ({spread})"


if __name__ == "__main__":
    main()
