"""Small models that see what breaks the promise of `reproducibility: exact`, on a part of the devices.

A CNN with BatchNorm and a GPT are the models that see faults; an MLP hides most of them.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen
from jax.sharding import Mesh

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import as_per_example
from cyxjax.core.mesh import build_mesh, local_value, num_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.adapter import adapt
from cyxjax.core.step import TrainState, init_state
from cyxjax.data.sources import ArrayDataset
from cyxjax.train import loop
from cyxjax.train.feeding.feed import build_feed
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState, StepInfo
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.program import Program, Recipe, build_program
from cyxjax.train.settings import resolve

GLOBAL_BATCH, SAMPLES = 32, 32 * 2 + 21  # the last step is ragged: a part of it has one sample, or none


class MLP(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.LayerNorm()(linen.Dense(64)(x)))
        return linen.Dense(10)(linen.Dropout(0.3, deterministic=not train)(x))


class CNN(linen.Module):
    """A bias before BatchNorm has a gradient of rounding noise, which Adam makes large: it sees every bit."""

    @linen.compact
    def __call__(self, x, train=False):
        for features in (8, 16):
            x = linen.Conv(features, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
            x = linen.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(32)(x.reshape(x.shape[0], -1)))
        return linen.Dense(10)(linen.Dropout(0.3, deterministic=not train)(x))


class Problem(NamedTuple):
    model: Any
    data: ArrayDataset


def problem(name: str) -> Problem:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, SAMPLES).astype(np.int32)
    if name == "mlp":
        return Problem(MLP(), ArrayDataset(rng.normal(size=(SAMPLES, 100)).astype(np.float32), labels))
    if name == "cnn":
        images = rng.normal(size=(SAMPLES, 14, 14, 1)).astype(np.float32)
        return Problem(CNN(), ArrayDataset(images, labels))
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
    }
    return DistributedTrainingConfig(**values | options)


class Trained(NamedTuple):
    """What a run left, as digests: equal where every bit is."""

    params: str
    sync: str
    model_state: str
    history: str
    end: RunState

    @property
    def bits(self) -> tuple[str, ...]:
        return self[:4]


class _Watch(Hook):
    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def on_step(self, info: StepInfo) -> None:
        self.seen.append(info.sums.tobytes())

    def on_epoch(self, info: EpochInfo) -> None:
        self.seen.append(repr((info.train, info.val)).encode())


def train(
    one: Problem,
    devices: int | Mesh,
    *,
    optimizer: Any = None,
    callbacks: Iterable[Hook] = (),
    from_: TrainState | None = None,
    **options: Any,
) -> Trained:
    """One run of `one` on so many devices of this process (or a mesh), through the trainer's own parts."""
    mesh = devices if isinstance(devices, Mesh) else build_mesh(jax.devices()[:devices])
    settings = config(**options)
    program, start = prepared(one, mesh, settings, optimizer, callbacks)
    val = ArrayDataset(one.data.inputs[:21], one.data.targets[:21])
    found = resolve(settings, num_replicas(mesh), len(one.data))
    feed = build_feed(FitData(one.data, val, True), found.step, found.reading, mesh, Tape())
    watch = _Watch()
    start = start._replace(state=from_) if from_ is not None else start
    end = loop.fit(
        program, feed, start, [watch, *callbacks], epochs=settings.epochs, max_steps=settings.max_steps
    )
    state = jax.tree.map(local_value, end.state)
    digests = [digest(part) for part in (state.params, state.sync, state.model_state)]
    return Trained(*digests, hashlib.sha256(b"".join(watch.seen)).hexdigest(), end._replace(state=state))


def prepared(
    one: Problem, mesh: Mesh, settings: DistributedTrainingConfig, optimizer: Any, callbacks: Iterable[Hook]
) -> tuple[Program, RunState]:
    loss = as_per_example(cx.CrossEntropyLoss())
    recipe = Recipe(adapt(one.model), loss, optimizer or cx.AdamOptimizer(0.01), Metrics(), tuple(callbacks))
    program = build_program(
        recipe, resolve(settings, num_replicas(mesh)).step, mesh, inputs=one.data.inputs[:1]
    )
    params, model_state = jax.tree.map(
        np.asarray, program.fns.init(jax.random.key(settings.seed), one.data.inputs[:1])
    )
    state = init_state(program.sync, mesh, params, model_state, settings.seed)
    return program, RunState(Position(), state, np.zeros((Metrics().num_training_rows, 2)))


def digest(tree: Any) -> str:
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def bits(trainer: Any) -> dict[str, str]:
    """Digests of what the trainer hands out, trains on with, and tells."""
    told = trainer.history
    curves = (told.train_losses, told.train_accuracies, told.val_losses, told.val_accuracies, told.metrics)
    return {
        "values": digest(trainer.values),
        "state": digest(jax.tree.map(np.asarray, trainer.state)),
        "curves": repr(curves),
    }
