"""A strategy on a mesh without a model: the test supplies the gradients."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

from cyxjax.core.evaluation import build_consensus
from cyxjax.core.mesh import PER_REPLICA, REPLICATED, build_mesh, put_rows
from cyxjax.core.portable import Share, placed, to_portable
from cyxjax.core.replica import from_replica, model_map, sync_map, to_replica
from cyxjax.core.step import TrainState, build_init, state_spec
from cyxjax.core.strategy import Stepped, Sync, norm_row
from cyxjax.sync.registry import STRATEGIES, build_sync

PyTree = Any
# Options under which a strategy is lossless for `whole_grads` and reduces in every step; usual options.
EXACT = {name: dict(one.lossless) for name, one in STRATEGIES.items() if one.lossless is not None}
USUAL = {
    name: dict((one.lossless or {}) if one.usual is None else one.usual) for name, one in STRATEGIES.items()
}
LR = 2.0**-7  # a power of two, so that steps on whole numbers are exact


def adaptive() -> optax.GradientTransformation:
    """Two moments and a counter, as in Adam. (optax's Adam breaks the strict dtype rule of these tests.)"""
    rate = optax.scale_by_schedule(lambda n: -LR / (1 + n.astype(np.float32)))
    return optax.chain(optax.scale_by_rms(), optax.trace(0.5), rate)


SGD, MOMENTUM, ADAPTIVE = optax.sgd(LR), optax.sgd(LR, momentum=0.5), adaptive()


def params(scale: float = 1.0) -> PyTree:
    """29 numbers: a matrix, a vector and a scalar."""
    leaves = {"dense": {"bias": np.arange(4.0), "kernel": np.arange(24.0).reshape(6, 4)}, "gain": 2.0}
    return jax.tree.map(lambda a: np.float32(scale * np.asarray(a)), leaves)


def like_params(vectors: np.ndarray) -> PyTree:
    """Rows of 29 numbers as trees shaped like `params()`, with a leading row dimension."""
    rows = np.asarray(vectors, np.float32)
    return {
        "dense": {"bias": rows[:, :4], "kernel": rows[:, 4:28].reshape(-1, 6, 4)},
        "gain": rows[:, 28],
    }


def whole_grads(replicas: int, step: int) -> PyTree:
    """Gradients that every scheme sends without loss: whole numbers up to 127, with a 127 in each block of 4.

    The others are multiples of 8 that differ by replica, so their mean over up to 8 replicas is whole too.
    """
    rng = np.random.default_rng(step)
    rows = 8.0 * rng.integers(-14, 15, (replicas, 29))
    rows[:, ::4] = 127
    return like_params(rows)


def random_grads(replicas: int, step: int, scale: float = 1.0) -> PyTree:
    rng = np.random.default_rng(100 + step)
    return like_params(scale * rng.normal(size=(replicas, 29)))


def built(name: str, optimizer: optax.GradientTransformation, options: Any = None, **more: Any) -> Sync:
    """The strategy `name` for the tree of `params()`."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), np.float32), params())
    return build_sync(name, optimizer, options, params=lambda: shapes, **more)


class Alone:
    """A strategy's state on `replicas` devices, and the compiled update."""

    def __init__(self, sync: Sync, replicas: int, start: PyTree = None):
        self.sync, self.mesh = sync, build_mesh(jax.devices()[:replicas])
        spec = state_spec(sync)

        def local(params: PyTree, rows: PyTree) -> PyTree:
            # As a model's backward pass: gradients of the stored parts, from those of the whole leaves.
            _, pullback = jax.vjp(lambda kept: sync.whole(kept, None), to_replica(params, spec.params))
            return from_replica(pullback(to_replica(rows, PER_REPLICA))[0], PER_REPLICA)

        def update(state: TrainState, rows: PyTree) -> tuple[TrainState, Any]:
            state, grads = to_replica(state, spec), to_replica(rows, PER_REPLICA)
            stepped = Stepped(*sync.update(grads, state.sync, state.params))
            row = norm_row(stepped, state.step)
            state = state._replace(step=state.step + 1, params=stepped.params, sync=stepped.state)
            return from_replica(state, spec), row

        backward = model_map(local, self.mesh, (spec.params, PER_REPLICA), PER_REPLICA)
        reduced = sync_map(update, self.mesh, (spec, PER_REPLICA), (spec, REPLICATED))
        self.norms: list[Any] = []  # rows with the norms of the mean gradients, by step
        self.update = jax.jit(lambda state, rows: reduced(state, backward(state.params, rows)))
        self.first_state = lambda: build_init(sync, self.mesh)(params() if start is None else start, {}, 0)

    @cached_property
    def state(self) -> TrainState:
        return self.first_state()

    def step(self, *grads: PyTree) -> "Alone":
        """One update for each tree of per-replica gradients (leaves (R, ...))."""
        for rows in grads:
            self.state, row = self.update(self.state, put_rows(self.mesh, rows))
            self.norms.append(np.asarray(row).tolist())
        return self

    def reload(self) -> "Alone":
        """Sends the state through host arrays, as a checkpoint does."""
        stored = to_portable(self.state, self.sync, self.mesh)
        values = lambda one: one.values() if isinstance(one, Share) else np.asarray(one)  # noqa: E731
        self.state = self.sync.stow(jax.tree.map(lambda one: placed(one, values(one), self.mesh), stored))
        return self

    def copies(self) -> Sequence[PyTree]:
        """The parameters of each replica, as its device holds them."""
        parts = self.sync.keeps_parts
        state = build_consensus(self.sync, self.mesh)(self.state) if parts else self.state
        squeeze = 0 if self.sync.params_spec == PER_REPLICA and not parts else ()

        def of(device: int) -> PyTree:
            pick = lambda a: np.asarray(a.addressable_shards[device].data).squeeze(squeeze)  # noqa: E731
            return jax.tree.map(pick, state.params)

        return [of(i) for i in range(self.mesh.size)]


def mean_of(rows: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a.mean(0), rows)
