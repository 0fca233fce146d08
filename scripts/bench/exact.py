"""What `reproducibility: exact` costs: samples per second beside `mean`, in turns in one process.

    python scripts/bench/exact.py [--models mlp cnn] [--parts 2 4 8] [--batch 64 512] [--rounds 5]
    python scripts/bench/exact.py --layouts 1x1 1x2 2x1      # processes x devices, each through the launcher
    python scripts/bench/exact.py --quick --layouts 1x1 2x1  # minutes: the MLP and the GPT, V of 2 and 8

A row: model, global batch, parts; medians of both and of their ratio a round (1.3x: exact takes 1.3 times as
long). Both compute with the same number of threads, --threads. Measure on a quiet machine.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train.trainer import DistributedTrainer

STEPS = 30


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
    return cx.get_model("gpt")(vocab_size=128, context_length=32, width=64), tokens, tokens


def runner(name: str, batch: int, **options: Any) -> Callable[[], float]:
    """A function that trains STEPS steps and gives samples per second; compiled when this returns."""
    model, x, y = problem(name, np.random.default_rng(0), batch * STEPS)
    trainer = DistributedTrainer(model, cx.CrossEntropyLoss(), cx.AdamOptimizer(0.001))
    config = DistributedTrainingConfig(
        epochs=1, global_batch_size=batch, verbose=False, checkpoint_every_n_epochs=0, **options
    )

    def once() -> float:
        return trainer.fit(x, y, config).samples_per_second  # of the steps alone

    once()
    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "gpt", "resnet18"])
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--parts", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--cpu-devices", type=int)
    parser.add_argument("--layouts", nargs="+", metavar="PxD", help="run these in turn")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.models, given.parts, given.rounds = ["mlp", "gpt"], [2, 8], 3
    if given.layouts:
        for layout in given.layouts:
            launch(layout, given)
        return
    measure(given)


def launch(layout: str, given: argparse.Namespace) -> None:
    """This script through the launcher, in `layout`: processes x devices of each."""
    processes, devices = map(int, layout.split("x"))
    words = ["-m", "cyxjax.launch", "--nproc-per-node", str(processes), __file__]
    for name in ("models", "batch", "parts", "rounds", "threads"):
        value = getattr(given, name)
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    print(f"{layout} (processes x devices of each)", flush=True)
    subprocess.run([sys.executable, *words, "--cpu-devices", str(processes * devices)], check=True)


def measure(given: argparse.Namespace) -> None:
    group = cx.distributed.init(cpu_devices=given.cpu_devices, threads=given.threads)
    for name in given.models:
        for batch in given.batch:
            plain = runner(name, batch)
            for parts in given.parts:
                if parts < group.mesh.size:
                    continue
                exact = runner(
                    name,
                    batch,
                    reproducibility="exact",
                    virtual_replicas=parts,
                    exact_threads=given.threads,
                )
                pairs = [(plain(), exact()) for _ in range(given.rounds)]
                if group.topology.is_master:
                    print(f"{name:9} batch {batch:4} parts {parts:3}: {told(pairs)}", flush=True)


def told(pairs: list[tuple[float, float]]) -> str:
    plain, exact = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    ratio = [one / other for one, other in pairs]
    spread = f"{statistics.median(ratio):.2f}x [{min(ratio):.2f}-{max(ratio):.2f}]"
    return f"mean {plain:8.0f}/s, exact {exact:8.0f}/s, {spread}"


if __name__ == "__main__":
    main()
