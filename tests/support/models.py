"""Small models and batches that the device tests share."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.memory import with_remat
from cyxjax.core.mesh import build_mesh, local_replicas, put_replicated, put_rows
from cyxjax.core.model import first_values
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.precision import parse_policy, with_policy
from cyxjax.core.step import Batch, TrainState, build_init, build_train_step
from cyxjax.core.strategy import Sync
from cyxjax.data.batches import BatchPlan, HostBatch, read_batch
from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset
from cyxjax.sync.registry import build_sync

FEATURES, CLASSES = 5, 3
CRITERION, SGD = CrossEntropyLoss(), optax.sgd(0.1)
UNIFORM = linen.initializers.uniform(0.6)  # compiles faster than draws of a normal distribution
Dense = partial(linen.Dense, kernel_init=UNIFORM)


class Net(linen.Module):
    """Two dense layers, with batch normalisation between them if asked for."""

    batch_norm: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = Dense(16)(x)
        if self.batch_norm:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return Dense(CLASSES)(linen.relu(x))


class Dropping(linen.Module):
    """Batch statistics and random draws, which differ most easily between two implementations of a step."""

    width: int = 16

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(Dense(self.width)(x))
        x = linen.Dropout(0.3, deterministic=not train)(linen.relu(x))
        return Dense(CLASSES)(x)


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


class Stepping(NamedTuple):
    """A step that is not compiled yet, and its initial state."""

    step: Any
    state: TrainState
    fns: ModelFns
    sync: Sync
    mesh: Mesh


def stepping(
    model: Any,
    samples: ArrayDataset,
    *,
    replicas: int | None = None,
    comm: str | Sync = "mean",
    rule: Any = None,
    options: Any = None,
    clip: float | None = None,
    wrap: Any = lambda sync: sync,
    loss: Any = None,
    precision: str = "float32",
    remat: str = "none",
    seed: int = 0,
    **more: Any,
) -> Stepping:
    """The step of `model` for `samples` on `replicas` devices; None: on all devices of all processes.

    comm: a strategy, or its name with `options`. more: arguments of `build_train_step`.
    """
    mesh = build_mesh(jax.devices()[:replicas])
    fns = with_remat(with_policy(adapt(model), parse_policy(precision)), remat)
    params, model_state = fns.init(jax.random.key(seed), samples.inputs[:1])
    if isinstance(comm, str):
        comm = build_sync(comm, rule or SGD, options, max_grad_norm=clip, params=lambda: params)
    sync = wrap(comm)
    step = build_train_step(fns, as_per_example(loss or CrossEntropyLoss()), sync, mesh, **more)
    return Stepping(step, build_init(sync, mesh)(params, model_state, seed), fns, sync, mesh)


def batches_of(
    samples: ArrayDataset, mesh: Mesh, batch_size: int, *, accumulation: int = 1, epochs: int = 1
) -> Iterator[Batch]:
    """The shuffled batches of each epoch on the devices of `mesh`. batch_size: of a replica's micro-batch."""
    plan, mine = BatchPlan(len(samples), batch_size, mesh.size, accumulation), local_replicas(mesh)
    for epoch in range(epochs):
        for t in range(plan.num_steps):
            yield put(mesh, read_batch(samples, Order(len(samples), 0, epoch), plan, mine, t))


def train(
    model: Any,
    dataset: ArrayDataset,
    *,
    replicas: int,
    batch_size: int,
    accumulation: int = 1,
    epochs: int = 2,
    **options: Any,
) -> tuple[TrainState, list[np.ndarray]]:
    """(host state, metric sums of each step) after `epochs` over `dataset` on `replicas` devices."""
    step, state, _, _, mesh = stepping(
        model, dataset, replicas=replicas, accumulation=accumulation, **options
    )
    sums = []
    for batch in batches_of(dataset, mesh, batch_size, accumulation=accumulation, epochs=epochs):
        state, measured = step(state, batch)
        sums.append(np.asarray(measured))
    return jax.device_get(state), sums


def largest_gap(a: Any, b: Any) -> float:
    """The largest absolute difference between the float leaves of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()) for x, y in pairs)


@pytest.fixture
def first_values_as_for_users(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """First values are compiled as for users, not with the fewer optimizations of the tests."""
    monkeypatch.setitem(first_values._OPTIONS, "xla_backend_optimization_level", 1)
    first_values._program.cache_clear()
    yield
    first_values._program.cache_clear()
