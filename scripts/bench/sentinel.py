"""Cost of comparing the replicas: never, at every step, and at the default interval, in alternating runs.

    python scripts/bench/sentinel.py [--rounds 5] [--epochs 2]

Two CPU devices, the MLP 784-256-10 with Adam, 1,000 steps of 64 samples per epoch. A step takes one to two
milliseconds, so that the relative cost is high. A first run of each, which compiles, is not measured.
"""

import argparse
import statistics

import numpy as np

import cyxjax as cx

SAMPLES, FEATURES, BATCH = 64_000, 784, 64
DEFAULT = cx.distributed.DistributedTrainingConfig().sentinel_every_n_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    cx.distributed.init(cpu_devices=2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    y = rng.integers(0, 10, SAMPLES).astype(np.int32)
    model = cx.get_model("mlp")(hidden=(256,))
    trainers = {
        every: cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.AdamOptimizer(0.001))
        for every in (0, 1, DEFAULT)
    }

    def step_ms(every: int, epochs: int) -> float:
        config = cx.distributed.DistributedTrainingConfig(epochs=epochs, batch_size=32, verbose=False)
        config.checkpoint_every_n_epochs, config.sentinel_every_n_steps = 0, every
        seconds = trainers[every].fit(x, y, config).total_time_seconds
        return seconds * 1000 / (epochs * SAMPLES / BATCH)

    for every in trainers:
        step_ms(every, 1)
    rounds = [{every: step_ms(every, args.epochs) for every in trainers} for _ in range(args.rounds)]
    step = statistics.median(found[0] for found in rounds)
    one = statistics.median(found[1] - found[0] for found in rounds)
    default = statistics.median(found[DEFAULT] / found[0] for found in rounds)
    print(f"step without comparison      {step:6.3f} ms")
    print(f"one comparison               {one:6.3f} ms (from runs that compare at every step)")
    print(f"every {DEFAULT} steps, computed    {one / DEFAULT / step:6.2%} of a step")
    print(f"every {DEFAULT} steps, measured    {default - 1:+6.2%} (equal runs differ by more)")


if __name__ == "__main__":
    main()
