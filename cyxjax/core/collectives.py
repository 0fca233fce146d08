"""Compiled collectives over one row per process, used by `distributed/collectives.py`.

Where nothing is computed, arrays are sent as bits, so -0.0, NaN payloads and every dtype arrive unchanged.
"""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED
from cyxjax.core.replica import from_replica, sync_map, to_replica
from cyxjax.core.trees import PyTree, widened


def put_row(mesh: Mesh, device: jax.Device, tree: PyTree) -> PyTree:
    """Global arrays (R, ...) with `tree` as this process's row, on its `device` of `mesh`."""
    sharding = NamedSharding(mesh, PER_REPLICA)

    def put(leaf: Any) -> jax.Array:
        # Of the host's arrays numpy makes the row: jax would compile a program for each shape. It is a copy,
        # which the caller cannot change.
        row = (
            jax.device_put(leaf, device)[None]
            if isinstance(leaf, jax.Array)
            else jax.device_put(np.array(leaf)[None], device)
        )
        shape = (mesh.size, *row.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, [row])

    return jax.tree.map(put, tree)


@lru_cache(maxsize=64)
def build_reduce(mesh: Mesh, op: str) -> Callable[[PyTree], PyTree]:
    """A function (rows) -> their `op` over processes, replicated. See `reduce_leaf` for dtypes."""
    return _program(mesh, lambda tree: jax.tree.map(lambda a: reduce_leaf(a, op), tree), REPLICATED)


@lru_cache(maxsize=64)
def build_broadcast(mesh: Mesh, src: int) -> Callable[[PyTree], PyTree]:
    """A function (rows) -> row `src`, replicated, bit for bit."""
    return _program(mesh, lambda tree: jax.tree.map(lambda a: held_by(src, a), tree), REPLICATED)


@lru_cache(maxsize=64)
def build_all_gather(mesh: Mesh) -> Callable[[PyTree], list[PyTree]]:
    """A function (rows) -> list of all rows, replicated."""

    def gather(tree: PyTree) -> list[PyTree]:
        rows = jax.tree.map(lambda a: _from_bits(_gathered(to_bits(a)), a.dtype), tree)
        return [jax.tree.map(lambda a, i=i: a[i], rows) for i in range(mesh.size)]

    return _program(mesh, gather, REPLICATED)


@lru_cache(maxsize=64)
def build_all_to_all(mesh: Mesh) -> Callable[[list[PyTree]], list[PyTree]]:
    """A function (rows of R trees each) -> rows: process i gets the i-th tree of every process, in order."""

    def swap(trees: list[PyTree]) -> list[PyTree]:
        stacked = jax.tree.map(lambda *a: jnp.stack([to_bits(x) for x in a]), *trees)
        moved = jax.tree.map(lambda a: lax.all_to_all(a, AXIS, 0, 0), stacked)
        return [
            jax.tree.map(lambda a, like, i=i: _from_bits(a[i], like.dtype), moved, trees[0])
            for i in range(mesh.size)
        ]

    return _program(mesh, swap, PER_REPLICA)


def held_by(replica: Any, a: jax.Array) -> jax.Array:
    """The array `a` of `replica`, bit for bit: a sum of floats would lose -0.0 and NaN payloads."""
    if jnp.iscomplexobj(a):
        return lax.complex(held_by(replica, a.real), held_by(replica, a.imag))
    bits = to_bits(a)
    # A sum with zeros: half the traffic of a gather, and memory for one row only.
    mine = jnp.where(lax.axis_index(AXIS) == replica, bits, jnp.zeros_like(bits))
    return _from_bits(lax.psum(mine, AXIS), a.dtype)


def reduce_leaf(a: jax.Array, op: str) -> jax.Array:
    """`op` over axis `data`, in `a`'s dtype (float16 is added in float32, as XLA adds bfloat16); the mean of
    integers or booleans is float32.

    For booleans a sum is "any" and a product is "all".
    """
    is_inexact = jnp.issubdtype(a.dtype, jnp.inexact)
    if op == "avg":
        mean = lax.pmean(widened(a) if is_inexact else a.astype(jnp.float32), AXIS)
        return mean.astype(a.dtype) if is_inexact else mean
    if a.dtype == jnp.bool_:
        largest = op in ("sum", "max")
        return (lax.pmax if largest else lax.pmin)(a.astype(jnp.uint8), AXIS).astype(jnp.bool_)
    if op == "product" or (is_inexact and op != "sum"):  # gloo's maximum loses a NaN
        return reduce_stack(_gathered(a), op)
    if op == "sum":
        return lax.psum(widened(a), AXIS).astype(a.dtype) if a.dtype == jnp.float16 else lax.psum(a, AXIS)
    return {"max": lax.pmax, "min": lax.pmin}[op](a, AXIS)


def reduce_stack(a: Any, op: str, numpy: Any = jnp) -> Any:
    """`op` over the first dimension of `a`, dtypes as `reduce_leaf`. numpy: the library `a` belongs to."""
    if op == "avg":
        # Of float16 both libraries take sums in float32, unless a dtype is given.
        return numpy.mean(a, axis=0, dtype=None if numpy.issubdtype(a.dtype, numpy.inexact) else "float32")
    if a.dtype == bool:
        return (numpy.any if op in ("sum", "max") else numpy.all)(a, axis=0)
    if op in ("sum", "product"):
        return (numpy.sum if op == "sum" else numpy.prod)(a, axis=0, dtype=a.dtype)
    # Pair by pair: XLA's reduction on CPUs loses the NaN of a later row in arrays of 30,000 numbers.
    return reduce(numpy.maximum if op == "max" else numpy.minimum, a)


def _program(mesh: Mesh, f: Callable, out_spec: Any) -> Callable[[PyTree], Any]:
    def run(rows: PyTree) -> PyTree:
        return from_replica(f(to_replica(rows, PER_REPLICA)), out_spec)

    return jax.jit(sync_map(run, mesh, PER_REPLICA, out_spec))


def _gathered(a: jax.Array) -> jax.Array:
    return lax.all_gather(a, AXIS, to="invarying")


def to_bits(a: jax.Array) -> jax.Array:
    """`a` as unsigned integers of the same width; booleans as uint8."""
    if a.dtype == jnp.bool_:
        return a.astype(jnp.uint8)
    return lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return bits.astype(jnp.bool_) if dtype == jnp.bool_ else lax.bitcast_convert_type(bits, dtype)
