"""Small models that detect violations of `reproducibility: exact`, on some of the devices.

A CNN with BatchNorm and a GPT detect faults; an MLP hides most of them.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.exact.step import by_device
from cyxjax.data.sources import ArrayDataset
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import use_devices

# the last step is ragged: five of its eight parts have one sample, three have none
GLOBAL_BATCH, SAMPLES, VAL = 32, 32 * 2 + 5, 21


class MLP(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dropout(0.3, deterministic=not train)(linen.relu(linen.Dense(16)(x)))
        return linen.Dense(10)(x)


class CNN(linen.Module):
    """The gradient of a bias before BatchNorm is rounding noise, which Adam amplifies: every bit counts."""

    features: tuple[int, ...] = (4, 8)

    @linen.compact
    def __call__(self, x, train=False):
        for features in self.features:
            x = linen.Conv(features, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
            x = linen.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = linen.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return linen.Dense(10)(x)


class Problem(NamedTuple):
    model: Any
    data: ArrayDataset


def problem(name: str) -> Problem:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, SAMPLES).astype(np.int32)
    if name == "mlp":
        return Problem(MLP(), ArrayDataset(rng.normal(size=(SAMPLES, 100)).astype(np.float32), labels))
    if name.startswith("cnn"):
        images = rng.normal(size=(SAMPLES, 8, 8, 1)).astype(np.float32)
        return Problem(CNN((4,) if name == "cnn of a layer" else (4, 8)), ArrayDataset(images, labels))
    if name == "resnet18":
        images = rng.normal(size=(SAMPLES, 32, 32, 3)).astype(np.float32)
        return Problem(cx.get_model("resnet18")(small_images=True, width=8), ArrayDataset(images, labels))
    assert name == "gpt"
    shape = {"num_layers": 1, "num_heads": 2, "width": 32, "dropout": 0.1}
    tokens = rng.integers(0, 64, (SAMPLES, 16)).astype(np.int32)
    return Problem(
        cx.get_model("gpt")(vocab_size=64, context_length=16, **shape), ArrayDataset(tokens, tokens.copy())
    )


def config(**options: Any) -> DistributedTrainingConfig:
    values = {
        "reproducibility": "exact",
        "global_batch_size": GLOBAL_BATCH,
        "max_grad_norm": 1.0,
        "epochs": 1,
        "verbose": False,
        "checkpoint_every_n_epochs": 0,
        "sentinel_every_n_steps": 0,  # `bits` compares the devices, without a program for it
    }
    return DistributedTrainingConfig(**values | options)


def trained(
    one: Problem,
    devices: int,
    *,
    loss: Any = None,
    hooks: Any = (),
    data: Any = None,
    metrics: Any = None,
    **options: Any,
) -> DistributedTrainer:
    """A trainer after one fit on `devices` devices of this process. options: of `fit`."""
    use_devices(devices)
    loss, optimizer = loss or cx.CrossEntropyLoss(), cx.AdamOptimizer(0.01)
    trainer = DistributedTrainer(one.model, loss, optimizer, callbacks=hooks, metrics=metrics)
    fit(trainer, one, data, **options)
    return trainer


def fit(
    trainer: DistributedTrainer, one: Problem, data: Any = None, *, evaluates: bool = True, **options: Any
) -> None:
    # Targets differ from those in training: learning makes this loss worse, which stops early.
    val = ArrayDataset(one.data.inputs[:VAL], (one.data.targets[:VAL] + 1) % 10)
    trainer.fit(data or one.data, val if evaluates else None, config=config(**options))


def digest(tree: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


def bits(trainer: Any) -> dict[str, str]:
    """Digests of the trainer's values, its state and its history; every device must hold the same state."""
    history, state = trainer.history, trainer.state
    (held,) = {digest(copy) for copy in by_device(state, [*state.step.devices()])}
    names = ("train_losses", "train_accuracies", "val_losses", "val_accuracies", "metrics")
    return {
        "values": digest(trainer.values),
        "state": held,
        "curves": repr(tuple(getattr(history, name) for name in names)),
    }
