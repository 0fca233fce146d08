"""Work of the host per step, without the compiled program, as data, devices and epochs grow.

    python scripts/bench/growth.py [--steps 400] [--quick]

Each cell runs in its own process: a whole `fit` whose compiled step is replaced by a function that returns
the state unchanged, so that only the host's work remains: order, gather, placement, hooks, history, ledger.
The difference of two fits of different lengths excludes the cost of start and end. The number of function
calls is reproducible; CPU time (the minimum of five) is not, so compare it on an idle machine.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing, redirect_stdout

import numpy as np
from peers import run as run_process

BATCH, FEATURES = 32, 16
CELLS = [
    *({"samples": 10**n} for n in (3, 5, 7, 9)),
    *({"devices": n} for n in (2, 4, 8)),
    *({"epochs": n} for n in (30, 300, 3000)),
]
_LIMIT_S = 1800


class Numbers:
    """A dataset of any length that stores nothing; all values are zero."""

    def __init__(self, num_samples: int):
        self._length = num_samples

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(indices), FEATURES), np.float32), np.zeros(len(indices), np.int32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of a few cells, to test the program"
    )
    parser.add_argument("--cell", type=json.loads, help="measure this cell (JSON) in this process")
    args = parser.parse_args()
    if args.cell is not None:
        print(json.dumps(measured(args.steps, **args.cell)))
        return 0
    failed = False
    print("| | calls per step | CPU time per step |\n| --- | ---: | ---: |")
    for cell in CELLS[:-1:3] if args.quick else CELLS:
        command = [sys.executable, __file__, "--steps", "40" if args.quick else str(args.steps)]
        out, errors = run_process([*command, "--cell", json.dumps(cell)], devices=1, limit_s=_LIMIT_S)
        (name, number), *_ = cell.items()
        print(f"| {number:,} {name} | {_row(out, errors)} |", flush=True)
        failed |= not out
    return int(failed)


def _row(out: str, errors: str) -> str:
    """The numbers in the last line of a cell's output, or the reason for no result."""
    if not out:
        return f"not run: {(errors.splitlines() or ['no result'])[-1][:80]} |"
    calls, seconds = json.loads(out.splitlines()[-1])
    return f"{calls:.0f} | {1e6 * seconds:.0f} us"


def measured(steps: int, samples: int = 10**5, devices: int = 1, epochs: int = 0) -> tuple[float, float]:
    """(function calls of the main thread, CPU seconds of the process) per step.

    epochs: if not 0, train this many epochs of one step and measure the last ones, with their ends and saves.
    """
    import optax
    from flax import linen

    import cyxjax as cx

    cx.distributed.init(cpu_devices=devices)
    trainer = cx.distributed.DistributedTrainer(linen.Dense(2), cx.CrossEntropyLoss(), optax.adam(1e-3))
    data = Numbers(BATCH * devices if epochs else samples)
    long = epochs or steps
    short = long - min(long // 2, 100)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = lambda count: fit(trainer, data, count, folder)  # noqa: E731
        run(2)  # creates what later runs reuse
        counts = [calls(lambda n=n: run(n)) for n in (short, long)]
        times = [min(spent(lambda n=n: run(n)) for _ in range(5)) for n in (short, long)]
    each = [(b - a) / (long - short) for a, b in (counts, times)]
    return each[0], each[1]


def fit(trainer, data: Numbers, num_steps: int, folder: str) -> None:
    """Runs `num_steps` steps without computing them: the state does not change."""
    import jax
    import jax.numpy as jnp

    import cyxjax as cx
    from cyxjax.train.hooks.hook import Position

    config = cx.distributed.DistributedTrainingConfig(
        epochs=10**9, batch_size=BATCH, max_steps=num_steps, checkpoint_dir=folder, resume="never", prefetch=0
    )
    plan = trainer.prepare(data, config=config)
    program, state = trainer.program, jax.tree.map(jnp.copy, trainer.state)
    with closing(iter(plan.feed.train(Position(), lambda: (0.0, False), 1))) as batches:
        _, sums = program.train_step(state, next(batches).batch)
    several = jnp.stack([sums] * plan.steps_at_once)
    nothing = program._replace(
        train_step=lambda state, batch: (state, sums),
        train_steps=lambda state, batches, first, stop: (state, several),
    )
    trainer._run.last = plan, nothing
    trainer.fit_prepared(plan)


def calls(run) -> int:
    """The number of Python and C functions that `run` calls on this thread."""
    count = 0

    def noted(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(noted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def spent(run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
