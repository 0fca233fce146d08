"""This process's part of global arrays, as arrays on its own devices: views, no copies.

Hand-written loops run forward and backward on these views, so ranks may have different numbers of samples,
and only the update is a program of all processes.
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cyxjax.core.mesh import PER_REPLICA, refuse_wrapping
from cyxjax.core.trees import PyTree, owned


def to_local(mesh: Mesh, tree: PyTree, spec: PartitionSpec) -> PyTree:
    """Global arrays with `spec` on `mesh` as arrays on this process's devices; rows become its own rows."""
    return _rewrapped(mesh, mesh.local_mesh, tree, spec)


def to_global(mesh: Mesh, tree: PyTree, spec: PartitionSpec) -> PyTree:
    """Inverse of `to_local`: each process passes its part."""
    return _rewrapped(mesh.local_mesh, mesh, tree, spec)


def place_rows(mesh: Mesh, tree: PyTree, pad_with_zeros: bool = False) -> PyTree:
    """Rows (n, ...) split over the devices of a local mesh in contiguous blocks.

    If n is not a multiple of the device count, rows are added at the end: the first ones again, or zeros.
    Raises: DataError for an integer that jax cannot hold without x64.
    """
    refuse_wrapping(tree)
    sharding = NamedSharding(mesh, PER_REPLICA)

    def place(a: Any) -> jax.Array:
        missing = padded_rows(a.shape[0], mesh) - a.shape[0]
        if missing and (pad_with_zeros or not a.shape[0]):
            a = jnp.concatenate([a, jnp.zeros((missing, *a.shape[1:]), a.dtype)])
        elif missing:
            a = jnp.concatenate([a, jnp.resize(a, (missing, *a.shape[1:]))])
        return jax.device_put(a, sharding)

    return jax.tree.map(place, owned(tree))


def cut_rows(tree: PyTree, num_rows: int) -> PyTree:
    """Inverse of `place_rows`: the first `num_rows` rows."""
    return jax.tree.map(lambda a: a if a.shape[0] == num_rows else a[:num_rows], tree)


def padded_rows(num_rows: int, mesh: Mesh) -> int:
    """The least number of rows >= `num_rows` that gives all devices of `mesh` equally many, at least one."""
    return max(1, -(-num_rows // mesh.size)) * mesh.size


@lru_cache(maxsize=64)
def row_weight(num_rows: int, mesh: Mesh) -> jax.Array:
    """float32 (padded rows,): 1 for a row, 0 for an added one; on the devices of a local mesh."""
    weight = (np.arange(padded_rows(num_rows, mesh)) < num_rows).astype(np.float32)
    return jax.device_put(weight, NamedSharding(mesh, PER_REPLICA))


def _rewrapped(old: Mesh, new: Mesh, tree: PyTree, spec: PartitionSpec) -> PyTree:
    if old.size == new.size:
        return tree
    sharding = NamedSharding(new, spec)

    def wrap(a: jax.Array) -> jax.Array:
        rows = (a.shape[0] * new.size // old.size,) if spec == PER_REPLICA else a.shape[:1]
        shards = [s.data for s in a.addressable_shards]
        return jax.make_array_from_single_device_arrays((*rows, *a.shape[1:]), sharding, shards)

    return jax.tree.map(wrap, tree)
