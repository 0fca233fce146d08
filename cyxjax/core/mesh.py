"""The mesh: all devices of all processes on the axis `data`, and values placed on it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cyxjax.core.trees import PyTree
from cyxjax.errors import DataError

AXIS = "data"
_WRAPPING = (np.dtype("int64"), np.dtype("uint64"))  # jax truncates these to 32 bits unless x64 is enabled
REPLICATED = P()
PER_REPLICA = P(AXIS)
HOST_MEMORY = "pinned_host"  # jax's name for host memory that a device can read
PutShards = Callable[..., jax.Array]
"""(global shape, dtype on the host, sharding, shards, devices) -> the array of these shards, one for each of
this process's devices"""


def build_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh over `devices` (default: all devices of all processes), ordered by process.

    Uses `Mesh`, because `jax.make_mesh` creates Explicit axes since jax 0.9, which type-check the sharding
    of every operation of user code.
    """
    found = jax.devices() if devices is None else devices
    return Mesh(np.array(sorted(found, key=lambda d: (d.process_index, d.id))), (AXIS,))


def num_replicas(mesh: Mesh) -> int:
    return mesh.shape[AXIS]


def local_replicas(mesh: Mesh) -> range:
    """The replicas this process owns: neighbours on the axis, since the mesh is ordered by process."""
    mine = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    return range(mine[0], mine[-1] + 1) if mine else range(0)


def put_rows(mesh: Mesh, tree: PyTree, memory: str | None = None, dim: int = 0) -> PyTree:
    """Global arrays from this process's rows: leaf (L * n, ...) -> (R * n, ...), split along axis `data`.

    memory: the kind of memory; None: the devices' default. dim: the dimension of rows.
    Raises: DataError for an integer that does not fit the dtype that jax will store it in.
    """
    refuse_wrapping(tree)
    sharding = NamedSharding(mesh, P(*[None] * dim, AXIS), memory_kind=memory)
    return jax.make_array_from_process_local_data(sharding, tree)


@functools.lru_cache(maxsize=8)
def build_put_rows(
    mesh: Mesh, put_shards: PutShards | None = None, dim: int = 0
) -> Callable[[PyTree], PyTree]:
    """`put_rows` on `mesh`, for repeated use with trees of the same shapes.

    On a mesh of one device arrays are returned unchanged: `jit` places them itself, and faster (0.1 ms).
    put_shards: a faster function to place shards, if there is one. An array on 2 devices of one process takes
    the host 7 us instead of 60, on one device in each of 2 processes 5 us instead of 65.
    """
    if mesh.size == 1:
        return _unplaced
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if put_shards is None or not mine:
        return functools.partial(put_rows, mesh, dim=dim)
    sharding, count = NamedSharding(mesh, P(*[None] * dim, AXIS)), len(mine)

    def put_leaf(leaf: Any) -> jax.Array:
        if type(leaf) is not np.ndarray or leaf.ndim <= dim or leaf.shape[dim] % count:
            return put_rows(mesh, leaf, dim=dim)  # which also raises if something is wrong
        before, size, after = leaf.shape[:dim], leaf.shape[dim] // count, leaf.shape[dim + 1 :]
        all_before = (slice(None),) * dim
        shards = [leaf[*all_before, i * size : (i + 1) * size] for i in range(count)]
        return put_shards((*before, size * mesh.size, *after), leaf.dtype, sharding, shards, mine)

    def put(tree: PyTree) -> PyTree:
        refuse_wrapping(tree)
        return jax.tree.map(put_leaf, tree)

    return put


def _unplaced(tree: PyTree) -> PyTree:
    refuse_wrapping(tree)
    return tree


def refuse_wrapping(tree: PyTree) -> None:
    """Raises: DataError with the value and its row for a value beyond int32 in an array of int64: without x64
    jax would keep its low bits, which mean a different class or token."""
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, np.ndarray) or leaf.dtype not in _WRAPPING or not leaf.size:
            continue
        kept = _limits(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if leaf.max() > kept.max or leaf.min() < kept.min:
            row = int(np.argmax(((leaf > kept.max) | (leaf < kept.min)).reshape(len(leaf), -1).any(1)))
            wrong = leaf[row][(leaf[row] > kept.max) | (leaf[row] < kept.min)]
            raise DataError(
                f"row {row}: {wrong.reshape(-1)[0]} does not fit {kept.dtype}, in which jax keeps whole "
                "numbers, and would become another class or token. HINT: number classes and tokens from 0."
            )


_limits = functools.cache(np.iinfo)  # needed in each step, and slow to create


def put_replicated(mesh: Mesh, tree: PyTree, memory: str | None = None) -> PyTree:
    """Global arrays that every replica holds whole; each process must pass the same values.

    Nothing is compared here: `broadcast_parameters` and the replica sentinel keep ranks equal.
    """
    sharding = NamedSharding(mesh, REPLICATED, memory_kind=memory)
    if len(local_replicas(mesh)) == num_replicas(mesh):
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda a: jax.make_array_from_process_local_data(sharding, np.asarray(a), np.shape(a)), tree
    )


def local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of an array split along axis `data`, as a new host array."""
    # By their place: jax does not split an array without elements, whose shards are all the whole.
    shards = {s.index[0].start or 0: s for s in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start].data) for start in sorted(shards)])


def local_value(array: jax.Array) -> np.ndarray:
    """A replicated array as a new host array, without communication."""
    # A copy: a numpy view of a CPU buffer keeps its client alive (and its sockets open).
    return np.array(array.addressable_data(0), copy=True)


@contextmanager
def on_host() -> Iterator[jax.Device]:
    """Runs small work on the CPU, which compiles faster; without a CPU backend, on the first local device."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS does not include cpu
        device = jax.local_devices()[0]
    with jax.default_device(device):
        yield device
