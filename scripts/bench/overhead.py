"""What the trainer costs over a loop written by hand: the same model, data and optimizer, in turns (A B A B).

    python scripts/bench/overhead.py [--rounds 9] [--steps 400]

Prints samples/s of both (medians) and the ratio; 1.0 or more: the trainer is not slower.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import cyxjax as cx


class MLP(nn.Module):
    """784-256-10."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))


def by_hand(
    model: nn.Module, x: np.ndarray, y: np.ndarray, batch_size: int, steps: int
) -> Callable[[], float]:
    """Seconds for `steps` of the plain jitted loop: shuffled numpy batches, a step a call, state donated."""
    params = model.init(jax.random.key(0), x[:1])["params"]
    tx = optax.adam(1e-3)

    def loss_fn(params, x, y):
        logits = model.apply({"params": params}, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (jnp.argmax(logits, -1) == y).mean()

    @jax.jit
    def step(params, opt, x, y):
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss, accuracy

    step = jax.jit(step, donate_argnums=(0, 1))
    state = [params, tx.init(params)]

    def run() -> float:
        order = np.random.default_rng(0).permutation(len(x))
        start, per_epoch, losses = time.perf_counter(), len(x) // batch_size, []
        for i in range(steps):
            rows = order[i % per_epoch * batch_size :][:batch_size]
            state[0], state[1], loss, accuracy = step(state[0], state[1], x[rows], y[rows])
            losses.append((loss, accuracy))
            if i % 10 == 9:  # what a training loop shows its user: the mean since the last line
                np.mean([float(loss) for loss, _ in losses]), np.mean([float(a) for _, a in losses])
                losses.clear()
        jax.block_until_ready(state)
        return time.perf_counter() - start

    return run


def with_trainer(
    model: nn.Module, x: np.ndarray, y: np.ndarray, batch_size: int, steps: int
) -> Callable[[], float]:
    """Seconds for `steps` of `DistributedTrainer.fit`, epochs, metrics and history included."""
    trainer = cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-3))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=10**6, batch_size=batch_size, max_steps=steps, verbose=False, checkpoint_every_n_epochs=0
    )

    def run() -> float:
        return trainer.fit(x, y, config).total_time_seconds

    return run


def compare(name: str, model: nn.Module, x: np.ndarray, y: np.ndarray, steps: int, rounds: int) -> None:
    peers = {"hand-written": by_hand(model, x, y, 64, steps), "trainer": with_trainer(model, x, y, 64, steps)}
    for run in peers.values():
        run()  # compile
    seconds: dict[str, list[float]] = {who: [] for who in peers}
    for _ in range(rounds):
        for who, run in peers.items():
            seconds[who].append(run())
    ratios = [a / b for a, b in zip(seconds["hand-written"], seconds["trainer"], strict=True)]
    rate = {who: steps * 64 / statistics.median(s) for who, s in seconds.items()}
    rates = "   ".join(f"{who} {value:9,.0f} samples/s" for who, value in rate.items())
    spread = f"of {rounds} pairs: {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{name:12s} {rates}   ratio {statistics.median(ratios):.2f} ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    cx.distributed.init()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12_800, 784)).astype(np.float32), rng.integers(0, 10, 12_800).astype(np.int32)
    compare("784-256-10", MLP(), x, y, args.steps, args.rounds)
    digits = cx.data.load_dataset("digits").train
    images, labels = digits.take(np.arange(len(digits)))
    compare("digits CNN", cx.get_model("cnn")(), images, labels, args.steps // 4, args.rounds)


if __name__ == "__main__":
    main()
