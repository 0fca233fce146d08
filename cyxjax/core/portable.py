"""The training state in the form that checkpoints hold, and the initial state where replicas keep parts.

In a checkpoint the state is the same for any number of replicas. A strategy that splits its state over
replicas declares how `mean` would hold it (`Sync.stored_as`). Where every replica has values of its own, all
rows are stored: the same number of replicas takes the same next step, a different number starts from the mean
of the rows. Nothing is gathered: a process knows its share of each leaf.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cyxjax.core.memory import memory_options
from cyxjax.core.mesh import (
    HOST_MEMORY,
    PER_REPLICA,
    REPLICATED,
    local_replicas,
    local_rows,
    local_value,
    num_replicas,
    put_replicated,
    put_rows,
)
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.replica import by_spec, model_map
from cyxjax.core.step import TrainState, first_state, state_spec
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree, named_leaves

FitRows = Callable[[str, np.ndarray, Any], np.ndarray | None]


@dataclass(frozen=True, eq=False)
class Share:
    """This process's share of a leaf in rows: elements `start` to `stop` of the stored leaf in C order."""

    shape: tuple[int, ...]  # of the stored leaf
    dtype: np.dtype
    start: int
    stop: int
    is_whole: bool  # whether this process holds every row
    rows_shape: tuple[int, ...]  # (L, n, ...): of this process's rows, padding included
    leaf: Any  # the leaf on the mesh, (R, n, ...)

    def values(self) -> np.ndarray:
        """The elements, flat, as a new host array."""
        on_mesh = hasattr(self.leaf, "addressable_shards")
        rows = local_rows(self.leaf) if on_mesh else np.array(self.leaf)
        return rows.reshape(-1)[: self.stop - self.start]


def to_portable(state: TrainState, sync: Sync, mesh: Mesh) -> TrainState:
    """`state` for storing: leaves in rows as this process's `Share`s, others as they are."""
    kept = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    inner, params = sync.stored_as(kept.sync, kept.params)
    mine, count = local_replicas(mesh), num_replicas(mesh)

    def share(leaf: Any, want: Any) -> Share:
        each, size = math.prod(leaf.shape[1:]), math.prod(want.shape)
        start, stop = (min(row * each, size) for row in (mine.start, mine.stop))
        rows_shape = (len(mine), *leaf.shape[1:])
        dtype = np.dtype(leaf.dtype)
        return Share(tuple(want.shape), dtype, start, stop, len(mine) == count, rows_shape, leaf)

    rows = by_spec(lambda leaf, spec: spec == PER_REPLICA, state, state_spec(sync))
    stored = kept._replace(sync=inner, params=params)
    return jax.tree.map(lambda cut, leaf, want: share(leaf, want) if cut else leaf, rows, state, stored)


def stored_shapes(state: TrainState, sync: Sync, mesh: Mesh) -> tuple[TrainState, FitRows]:
    """(leaves as `to_portable` would store them, a function that adapts rows of other numbers of replicas).

    The function is for `Checkpointer.restore(adapt=...)`; it returns None for any other difference.
    """
    stored = to_portable(state, sync, mesh)
    wants = [(name, want) for name, want in named_leaves(stored) if isinstance(want, Share)]
    names = {name for name, want in wants if want.shape == want.leaf.shape}

    def fit_rows(name: str, found: np.ndarray, want: Any) -> np.ndarray | None:
        as_rows = found.ndim == len(want.shape) and found.shape[1:] == tuple(want.shape[1:])
        if name not in names or not as_rows or found.dtype != want.dtype:
            return None
        wide = np.result_type(found.dtype, np.float32)  # numpy does not count bfloat16 as inexact
        floating = jnp.issubdtype(found.dtype, jnp.inexact)
        one = found.mean(0, dtype=wide).astype(found.dtype) if floating else found.max(0)
        one = np.where((found == found[0]).all(0), found[0], one)  # the mean of three equal values may round
        return np.broadcast_to(one, want.rows_shape).reshape(-1)

    return stored, fit_rows


def moved(state: TrainState, sync: Sync, like: TrainState, new: Sync, mesh: Mesh) -> TrainState:
    """`state`, which `sync` made, in the form of `new`, with the shapes of `like`; all processes call it.

    Both must be stored alike. Each leaf is gathered on the host and released before the next.
    """
    stored = dict(named_leaves(to_portable(state, sync, mesh)))

    def move(name: str, want: Any) -> jax.Array:
        whole = _gathered(stored[name])
        mine = whole.reshape(-1)[want.start : want.stop] if isinstance(want, Share) else whole
        return placed(want, mine, mesh)

    wants = to_portable(like, new, mesh)
    leaves = [move(name, want) for name, want in named_leaves(wants)]
    return jax.tree.unflatten(jax.tree.structure(wants), leaves)


def _gathered(leaf: Any) -> np.ndarray:
    """All elements of a stored leaf, in its shape."""
    if not isinstance(leaf, Share):
        return local_value(leaf)
    rows = multihost_utils.process_allgather(leaf.leaf, tiled=True)
    return np.asarray(rows).reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)


def placed(want: Any, array: np.ndarray, mesh: Mesh) -> Any:
    """A leaf of the state on the mesh, from the stored `array`; for a `Share`, its elements, flat."""
    if not isinstance(want, Share):
        return put_replicated(mesh, array, _memory_of(want))
    num_padding = math.prod(want.rows_shape) - array.size
    rows = np.pad(array, (0, num_padding)) if num_padding else array
    return put_rows(mesh, rows.reshape(want.rows_shape), _memory_of(want.leaf))


def _memory_of(leaf: Any) -> str | None:
    """The kind of memory that a leaf is kept in, if it is the host's; else None."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind == HOST_MEMORY else None


def holds_values(fns: ModelFns, inputs: PyTree) -> bool:
    """Whether the model already holds its parameters (nnx, SequentialModel), so that none are drawn."""
    made = jax.make_jaxpr(fns.init)(jax.random.key(0), inputs)
    return any(np.ndim(value) for value in made.consts)


def build_draw(fns: ModelFns, sync: Sync, mesh: Mesh) -> Any:
    """A jitted function (uint32 seed, inputs of one sample) -> the state before the first step, on the mesh.

    The numbers are those of `fns.init` with the seed's key, up to the last bit (the compiler fuses). Each
    replica draws every leaf and keeps its part: drawing needs no communication.
    """

    def local(seed: jax.Array, inputs: PyTree) -> TrainState:
        key = jax.random.key(seed)
        return first_state(sync, *fns.init(key, inputs), key)

    mapped = model_map(local, mesh, (REPLICATED, REPLICATED), state_spec(sync))
    # Otherwise a leaf drawn in 16 bits and kept in 32 has more digits than the same leaf drawn alone.
    draw = lambda seed, inputs: sync.stow(mapped(seed, inputs))  # noqa: E731
    return jax.jit(draw, compiler_options=memory_options(mesh) | {"xla_allow_excess_precision": False})
