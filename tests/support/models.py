"""Small models and batches that the device tests share."""

from typing import Any

import jax
import numpy as np
import optax
from flax import linen, nnx

from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.mesh import build_mesh, put_replicated, put_rows
from cyxjax.core.model.adapter import adapt
from cyxjax.core.step import Batch, TrainState, build_train_step, init_state
from cyxjax.data.batches import BatchPlan, HostBatch, read_batch
from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset
from cyxjax.sync.mean import mean

FEATURES, CLASSES = 5, 3


class Net(linen.Module):
    """Two dense layers, with batch normalisation between them if asked for."""

    batch_norm: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.Dense(16)(x)
        if self.batch_norm:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return linen.Dense(CLASSES)(linen.relu(x))


class NnxNet(nnx.Module):
    """The same in nnx, batch normalisation included."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.norm(self.first(x))))


def data(num_samples: int, seed: int = 0) -> ArrayDataset:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_samples, FEATURES)).astype(np.float32)
    return ArrayDataset(x, rng.integers(0, CLASSES, num_samples).astype(np.int32))


def put(mesh: Any, host: HostBatch) -> Batch:
    rows = put_rows(mesh, (host.inputs, host.targets, host.weight))
    signal = put_rows(mesh, np.zeros((mesh.size, 2), np.float32))
    return Batch(*rows, put_replicated(mesh, np.float32(host.total)), signal)


def train(
    model: Any,
    dataset: ArrayDataset,
    *,
    replicas: int,
    batch_size: int,
    accumulation: int = 1,
    epochs: int = 2,
    optimizer: Any = None,
    **options: Any,
) -> tuple[TrainState, list[np.ndarray]]:
    """(host state, metric sums of each step) after `epochs` over `dataset` on `replicas` devices."""
    mesh, fns = build_mesh(jax.devices()[:replicas]), adapt(model)
    sync = mean(optimizer or optax.sgd(0.1))
    state = init_state(sync, mesh, *fns.init(jax.random.key(0), dataset.inputs[:1]), 0)
    step = build_train_step(
        fns, as_per_example(CrossEntropyLoss()), sync, mesh, accumulation=accumulation, **options
    )
    plan = BatchPlan(len(dataset), batch_size, replicas, accumulation)
    sums = []
    for epoch in range(epochs):
        order = Order(len(dataset), 0, epoch)
        for t in range(plan.num_steps):
            state, measured = step(state, put(mesh, read_batch(dataset, order, plan, range(replicas), t)))
            sums.append(np.asarray(measured))
    return jax.device_get(state), sums


def largest_gap(a: Any, b: Any) -> float:
    """The largest absolute difference between the float leaves of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()) for x, y in pairs)
