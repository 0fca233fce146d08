"""The two maps of a step, and the conversion between per-replica and replicated values.

Two maps run a step, because `jax.grad` of replicated params in a checked map is already summed over
replicas, and Flax RNNs do not pass the check:

- `model_map`: unchecked. User code runs here; what it returns is per replica, gradients stay LOCAL.
- `sync_map`: checked. Only our reductions run here; an output declared replicated is *proved* so, and a
  forgotten reduction is refused when the step is traced.

Between the maps a per-replica value is a global array with one row per replica (spec `P("data")`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cyxjax.core.exchange import over, sends_one_by_one, with_joint_sums
from cyxjax.core.mesh import AXIS, PER_REPLICA
from cyxjax.core.trees import PyTree, overlaid, widened


def model_map(f: Callable, mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`f` on each replica, unchecked: any Flax module runs, and `grad` of replicated params stays local."""
    return _mapped(f, mesh, in_specs, out_specs, checked=False)


def sync_map(f: Callable, mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`f` on each replica, checked: out_specs `P()` proves that replicas agree.

    On one replica nothing is checked, so that `psum` may return values unchanged. Sums over replicas in `f`
    are sent as one exchange (`core/exchange.py`).
    """
    f = with_joint_sums(f) if sends_one_by_one(mesh) else f
    return _mapped(f, mesh, in_specs, out_specs, checked=mesh.size > 1)


def _mapped(f: Callable, mesh: Mesh, in_specs: PyTree, out_specs: PyTree, checked: bool) -> Callable:
    def empty(a: Any, spec: P) -> jax.Array | None:
        """A replica's part of the argument `a`, if it has no elements; else None."""
        if 0 not in jnp.shape(a):
            return None
        local = lax.full(NamedSharding(mesh, spec).shard_shape(jnp.shape(a)), 0, jax.dtypes.result_type(a))
        return lax.pcast(local, AXIS, to="varying") if checked and AXIS in spec else local

    def mapped(*args: Any) -> Any:
        # Empty arrays are created inside: XLA of jaxlib 0.11.2 crashes (SIGSEGV, in compile) if one of
        # several arguments of a map is empty. Its zero_sized_hlo_elimination replaces it by a constant, which
        # has no sharding for the partitioner. Trees are rebuilt, with None as leaves, only in that case: a
        # registered class may read the shapes of its arrays.
        has_empty = any(0 in jnp.shape(a) for a in jax.tree.leaves(args))

        def run(*entered: Any) -> Any:
            with over(mesh):
                return f(*(overlaid(entered, by_spec(empty, args, in_specs)) if has_empty else entered))

        entering = jax.tree.map(lambda a: None if 0 in jnp.shape(a) else a, args) if has_empty else args
        into = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked)
        return into(*entering)

    return mapped


def psum(tree: PyTree) -> PyTree:
    """The sum over replicas. On one replica `tree` itself: XLA:CPU would copy it, and not fuse across it."""
    return tree if lax.axis_size(AXIS) == 1 else lax.psum(tree, AXIS)


def pmean(tree: PyTree) -> PyTree:
    """The mean over replicas; on one replica `tree` itself. That of float16, whose sum may overflow, is
    computed in float32."""

    def mean(a: jax.Array) -> jax.Array:
        wide = widened(a) if a.dtype == jnp.float16 else a
        return lax.pmean(wide, AXIS).astype(a.dtype)

    return tree if lax.axis_size(AXIS) == 1 else jax.tree.map(mean, tree)


def to_replica(tree: PyTree, spec: PyTree) -> PyTree:
    """This replica's view of the map's arguments: drops the row dimension where spec is `P("data")`."""
    return by_spec(lambda a, s: a[0] if s == PER_REPLICA else a, tree, spec)


def from_replica(tree: PyTree, spec: PyTree) -> PyTree:
    """Inverse of `to_replica`: adds a row dimension of 1, so that the map stacks replicas."""
    return by_spec(lambda a, s: a[None] if s == PER_REPLICA else a, tree, spec)


def by_spec(f: Callable, tree: PyTree, spec: PyTree) -> PyTree:
    """Maps `f(leaf, its spec)` where `spec` is a prefix of `tree`, as in `shard_map`'s own specs."""
    return jax.tree.map(
        lambda s, sub: jax.tree.map(lambda a: f(a, s), sub), spec, tree, is_leaf=lambda s: isinstance(s, P)
    )
