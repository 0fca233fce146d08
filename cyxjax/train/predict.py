"""A model's outputs for arrays of any length, from all replicas, whole on every rank."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cyxjax.core.mesh import local_replicas, local_rows, num_replicas, put_rows
from cyxjax.core.step import TrainState

PyTree = Any


def outputs(predict_step: Callable, state: TrainState, mesh: Mesh, inputs: PyTree, each: int) -> PyTree:
    """numpy, first dimension as that of `inputs`; `each`: samples a replica takes at once.

    state: as `build_consensus` gives it. Every rank passes the same inputs.
    """
    rows, mine, parts = len(jax.tree.leaves(inputs)[0]), local_replicas(mesh), []
    for start in range(0, rows, each * num_replicas(mesh)):
        # The last batch is filled up from the beginning; what is too much is cut off below.
        places = np.arange(start + mine.start * each, start + mine.stop * each) % rows
        batch = put_rows(mesh, jax.tree.map(lambda a, p=places: np.asarray(a)[p], inputs))
        parts.append(_whole(predict_step(state, batch)))
    return jax.tree.map(lambda *p: np.concatenate(p)[:rows], *parts)


def _whole(rows: PyTree) -> PyTree:
    if jax.process_count() == 1:
        return jax.tree.map(local_rows, rows)
    return multihost_utils.process_allgather(rows, tiled=True)
