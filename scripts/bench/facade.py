"""Time per step of the compiled step, of the DDP wrapper, and of the wrapper with an explicit all-reduce.

    python scripts/bench/facade.py [--devices 2] [--batch 64] [--steps 50] [--rounds 5]

One process, an MLP 784-256-10 with Adam. Each round measures every row, so that other load slows all rows
alike. Prints a Markdown table of the medians of the rounds, with the number of programs that a step runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

import cyxjax as cx
from cyxjax import distributed as dist
from cyxjax.core.losses import as_per_example
from cyxjax.core.mesh import put_replicated, put_rows
from cyxjax.core.model.adapter import adapt
from cyxjax.core.step import Batch, build_init, build_train_step
from cyxjax.distributed.process_group import current
from cyxjax.sync.mean import mean

CRITERION = cx.CrossEntropyLoss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="CPU devices, if there is no GPU")
    parser.add_argument("--batch", type=int, default=64, help="samples per device")
    parser.add_argument("--steps", type=int, default=50, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    dist.init(cpu_devices=args.devices)
    rng, rows = np.random.default_rng(0), args.batch * dist.get_num_replicas()
    x = rng.normal(size=(rows, 784)).astype(np.float32)
    y = rng.integers(0, 10, rows).astype(np.int32)
    ways = {
        "compiled step (the trainer's)": (compiled(x, y), 1),
        "wrapper: forward, loss, backward, update": (by_hand(x, y, explicit=False), 4),
        "wrapper, with sync_gradients()": (by_hand(x, y, explicit=True), 5),
    }
    table: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):  # the first round compiles
        for name, (run, _) in ways.items():
            table[name].append(1e3 * timed(run, args.steps))
    print(f"{dist.get_num_replicas()} x {jax.devices()[0].device_kind}, {args.batch} samples each\n")
    print("| step | programs | median ms | samples/s |\n| --- | --- | --- | --- |")
    for name, (_, programs) in ways.items():
        middle = statistics.median(table[name][1:])
        print(f"| {name} | {programs} | {middle:.2f} | {rows / middle * 1e3:,.0f} |")


def model() -> cx.models.SequentialModel:
    return cx.models.SequentialModel(
        [cx.models.LinearModule(784, 256), cx.models.ReLUModule(), cx.models.LinearModule(256, 10)]
    )


def compiled(x: np.ndarray, y: np.ndarray) -> Callable[[], jax.Array]:
    """A function that runs one step of the trainer's program; the batch is already on the devices."""
    mesh, fns, sync = current().mesh, adapt(model()), mean(cx.AdamOptimizer(0.001))
    held = [build_init(sync, mesh)(*fns.init(jax.random.key(0), x[:1]), 0)]
    step = build_train_step(fns, as_per_example(CRITERION), sync, mesh)
    weight, signal = np.ones(len(x), np.float32), np.zeros((mesh.size, 2), np.float32)
    rows = put_rows(mesh, (x, y, weight))
    batch = Batch(*rows, put_replicated(mesh, np.float32(len(x))), put_rows(mesh, signal))

    def run() -> jax.Array:
        held[0], sums = step(held[0], batch)
        return sums.block_until_ready()

    return run


def by_hand(x: np.ndarray, y: np.ndarray, explicit: bool) -> Callable[[], jax.Array]:
    """A function that runs one step of a loop written by hand; the batch is already on the devices."""
    ddp, optimizer = dist.DistributedDataParallel(model()), cx.AdamOptimizer(0.001)
    inputs, targets = put_rows(current().mesh, (x, y))

    def run() -> jax.Array:
        loss = ddp.loss(CRITERION, ddp(inputs), targets)
        loss.backward()
        if explicit:
            ddp.sync_gradients()
        ddp.update_parameters(optimizer)
        return loss.value.block_until_ready()

    return run


def timed(run: Callable[[], jax.Array], steps: int) -> float:
    """Seconds per step, the mean of `steps`."""
    start = time.perf_counter()
    for _ in range(steps):
        run()
    return (time.perf_counter() - start) / steps


if __name__ == "__main__":
    main()
