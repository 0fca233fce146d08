"""Names of a tree's leaves (paths such as `params/Dense_0/kernel`), and small functions of trees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
"""A tree of containers with arrays (or their shapes) as leaves, as in `jax.tree`."""


def path_name(path: Any, separator: str = "/") -> str:
    """The name of the leaf at a path of `jax.tree_util`; "" for a tree that is one leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def named_leaves(tree: PyTree, separator: str = "/") -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf, in the tree's order."""
    return [(path_name(path, separator), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def leaf_names(tree: PyTree) -> list[str]:
    """Names of the leaves, in the tree's order."""
    return [name for name, _ in named_leaves(tree)]


def kind_of(value: Any) -> str:
    """A description of `value` for an error message; a traced array is described as an array."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def batch_shapes(samples: PyTree, rows: Any) -> PyTree:
    """`samples`, arrays (N, ...), as shapes (rows, ...) in the dtypes jax converts them to; () stays ().

    jax 0.11 warns where a shape is int64 and 64 bits are off, though it takes an array of int64 as int32.
    """

    def one(a: Any) -> jax.ShapeDtypeStruct:
        shape = (rows, *a.shape[1:]) if a.shape else ()
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(a.dtype))

    return jax.tree.map(one, samples)


def owned(tree: PyTree) -> PyTree:
    """`tree` with copies of its NumPy arrays: on CPUs jax reads the memory of the given ones, also after a
    call has returned, when the caller may have refilled them."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a leaf's name matches one of `patterns`; `*` matches any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["impl"])
@dataclass(frozen=True)
class KeyBits:
    """A typed random key as integers, which can be saved, split and compared."""

    bits: jax.Array  # uint32
    impl: str = field(metadata={"static": True})


def keys_as_bits(tree: PyTree) -> PyTree:
    """`tree` with `KeyBits` in place of typed keys."""

    def one(leaf: Any) -> Any:
        is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return KeyBits(jax.random.key_data(leaf), str(jax.random.key_impl(leaf))) if is_key else leaf

    return jax.tree.map(one, tree)


def bits_as_keys(tree: PyTree) -> PyTree:
    """Inverse of `keys_as_bits`."""

    def one(node: Any) -> Any:
        is_key = isinstance(node, KeyBits)
        return jax.random.wrap_key_data(node.bits, impl=node.impl) if is_key else node

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, KeyBits))


def unchanged(tree: PyTree) -> PyTree:
    return tree


def on_device(leaf: jax.Array) -> jax.Array:
    """`leaf` in device memory, also if it is kept on the host."""
    in_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
    return jax.device_put(leaf, jax.memory.Space.Device) if in_host else leaf


# XLA may fuse the reductions of all leaves of a program, and count for each leaf again all that it has fused:
# with 2,000 leaves, a chain of additions took 19 s to compile.
_AT_ONCE = 64


def chunks(leaves: list[Any]) -> list[list[Any]]:
    """`leaves` in lists of at most 64, for reductions that are compiled list by list."""
    return [leaves[start : start + _AT_ONCE] for start in range(0, len(leaves), _AT_ONCE)]


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf stands for values that are not known yet: within a trace of jax."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def widened(leaf: jax.Array) -> jax.Array:
    """16-bit floats as float32: a compiler may leave out the rounding between two 16-bit additions."""
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if narrow else leaf


def times(factor: Any, tree: PyTree) -> PyTree:
    """The leaves multiplied by `factor`, in their own dtypes; a product of 16 bits is rounded once."""

    def product(leaf: jax.Array) -> jax.Array:
        wide = widened(leaf)
        return (wide * factor.astype(wide.dtype)).astype(leaf.dtype)

    return jax.tree.map(product, tree)


def are_finite(tree: PyTree) -> jax.Array:
    """bool (): whether no leaf of `tree` holds an infinity or a NaN."""
    # x - x is 0, or NaN. Such sums take half the time of `isfinite` in each element, and a program of 2,000
    # leaves compiles in 3 s, where one that combines booleans takes 23 s or more.
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    zeros = [jnp.abs(jnp.sum(leaf - leaf)).astype(jnp.float32) for leaf in leaves]
    return jnp.isfinite(jnp.array(zeros, jnp.float32)).all()


def as_labels(target: jax.Array) -> jax.Array:
    """`target`; integers and booleans, which are labels, as int32: uint8 cannot hold -100."""
    is_label = target.dtype == bool or jnp.issubdtype(target.dtype, jnp.integer)
    return target.astype(jnp.int32) if is_label else target


def overlaid(*parts: PyTree) -> PyTree:
    """A tree with, at each position, the first leaf among `parts` that is not None."""

    def first(*leaves: Any) -> Any:
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(first, *parts, is_leaf=lambda leaf: leaf is None)
