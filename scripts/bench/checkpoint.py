"""Time per step, time for which a save blocks the training loop, and time until the save is on disk.

    python scripts/bench/checkpoint.py [--saves 5] [--batch-size 64]

One CPU device; an MLP whose parameters and Adam's two moments are 100 MB; a save every 20 steps to a folder
that is deleted afterwards. The loop waits only for the copy to the host; a thread writes the files.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np

import cyxjax as cx
from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.train.hooks.hook import Hook, StepInfo
from cyxjax.train.hooks.saving import CheckpointHook

FEATURES, WIDTH, EVERY = 1024, 2416, 20  # 3 x 8.3 million float32 numbers


class Clock(Hook):
    """The times (s) of steps and saves: `saves` has (start, loop continues), `written` (bytes, on disk)."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.saves: list[tuple[float, float]] = []
        self.written: list[tuple[int, float]] = []

    def on_step(self, info: StepInfo) -> None:
        del info
        self.steps.append(time.perf_counter())

    def watch(self) -> None:
        """Records the times of every later save of this process."""
        on_state, write = CheckpointHook.on_state, StepStore.write

        def timed_on_state(hook: CheckpointHook, moment: Any) -> None:
            began = time.perf_counter()
            on_state(hook, moment)
            self.saves.append((began, time.perf_counter()))

        def timed_write(store: StepStore, snapshot: Snapshot, *writers: Any) -> None:
            write(store, snapshot, *writers)
            self.written.append((snapshot.num_bytes, time.perf_counter()))

        CheckpointHook.on_state, StepStore.write = timed_on_state, timed_write  # type: ignore[method-assign]

    def step_ms(self, beside_a_write: bool) -> float:
        """The median duration of steps that (do not) overlap the writing of a save; NaN without such steps.

        Steps that wait for the copy of a save do not count.
        """
        busy = [(began, end) for (began, _), (_, end) in zip(self.saves, self.written, strict=True)]
        times_ms = [
            1000 * (end - begin)
            for begin, end in zip(self.steps[3:], self.steps[4:], strict=False)
            if not any(begin < continued and began < end for began, continued in self.saves)
            and any(begin < done and began < end for began, done in busy) == beside_a_write
        ]
        return statistics.median(times_ms) if times_ms else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    cx.distributed.init(cpu_devices=1)
    rng, rows = np.random.default_rng(0), args.batch_size * EVERY
    x, y = rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)
    clock = Clock()
    model = cx.get_model("mlp")(hidden=(WIDTH, WIDTH))
    trainer = cx.distributed.DistributedTrainer(
        model, cx.CrossEntropyLoss(), cx.AdamOptimizer(0.001), callbacks=[clock]
    )
    clock.watch()
    with tempfile.TemporaryDirectory() as folder:
        config = cx.distributed.DistributedTrainingConfig(
            epochs=args.saves, batch_size=args.batch_size, checkpoint_dir=folder, verbose=False
        )
        config.checkpoint_every_n_epochs, config.steps_in_flight = 1, 1
        trainer.fit(x, y, config)
    pairs = list(zip(clock.saves, clock.written, strict=True))
    print(f"state                            {clock.written[0][0] / 1e6:8.1f} MB")
    print(f"step                             {clock.step_ms(False):8.1f} ms")
    print(f"step while a save is written     {clock.step_ms(True):8.1f} ms")
    blocked = statistics.median(1000 * (continued - began) for (began, continued), _ in pairs)
    print(f"loop blocked per save            {blocked:8.1f} ms")
    committed = statistics.median(done - began for (began, _), (_, done) in pairs)
    print(f"from start of save to disk       {committed:8.2f} s")


if __name__ == "__main__":
    main()
