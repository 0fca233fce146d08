"""A training state as a checkpoint holds it, for any number of replicas; runs on the host.

A strategy that cuts its state by replicas says how `mean` would hold it (`Sync.to_portable`). Where every
replica has values of its own, all rows are stored: the same number of replicas takes the same next step,
another number starts from the mean of the rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core.mesh import PER_REPLICA, num_replicas
from cyxjax.core.replica import by_spec
from cyxjax.core.step import TrainState, place_state, state_spec
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import named_leaves

PyTree = Any
FitRows = Callable[[str, np.ndarray, Any], np.ndarray | None]


def to_portable(state: TrainState, sync: Sync, gather: Callable[[Any], np.ndarray]) -> TrainState:
    """What to store of `state`. gather: called on every process, with each leaf spread over several."""

    def on_host(leaf: Any, spec: Any) -> Any:
        spread = spec == PER_REPLICA and not getattr(leaf, "is_fully_addressable", True)
        return gather(leaf) if spread else leaf

    state = by_spec(on_host, state, state_spec(sync))
    params = sync.params_to_portable(state.params)
    return state._replace(sync=sync.to_portable(state.sync, params), params=params)


def stored_shapes(state: TrainState, sync: Sync) -> tuple[TrainState, FitRows]:
    """(arrays shaped as `to_portable` would store `state`, what settles rows of another number of replicas).

    The second is for `Checkpointer.restore(adapt=...)`: it refuses every other difference.
    """
    # Zeros that are never read take no memory.
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    params = sync.params_to_portable(empty.params)
    stored = empty._replace(sync=sync.to_portable(empty.sync, params), params=params)
    cut = by_spec(lambda leaf, spec: id(leaf) if spec == PER_REPLICA else None, empty, state_spec(sync))
    rows = set(jax.tree.leaves(cut))
    names = {name for name, leaf in named_leaves(stored) if id(leaf) in rows}

    def fit_rows(name: str, found: np.ndarray, want: Any) -> np.ndarray | None:
        if name not in names or found.shape[1:] != tuple(want.shape[1:]) or found.dtype != want.dtype:
            return None
        floating = np.issubdtype(found.dtype, np.inexact)
        one = found.mean(0, dtype=found.dtype) if floating else found.max(0)
        return np.broadcast_to(one, want.shape).copy()

    return stored, fit_rows


def from_portable(stored: TrainState, sync: Sync, mesh: Mesh) -> TrainState:
    """A restored state on the mesh, ready for the next step. Equal on all ranks."""
    count = num_replicas(mesh)
    inner = sync.from_portable(stored.sync, stored.params, count)
    params = sync.params_from_portable(stored.params, count)
    return place_state(stored._replace(sync=inner, params=params), sync, mesh)
