"""Compares the bits of all replicas, leaf by leaf, and finds the value that the majority holds.

Replicated values are equal by construction, and a step does not notice when they are not: after a flipped bit
in one device's memory, or with model code that depends on the rank, training continues without an error.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from cyxjax.core.collectives import held_by, to_bits
from cyxjax.core.mesh import AXIS, REPLICATED, local_value
from cyxjax.core.replica import by_spec, model_map
from cyxjax.core.trees import (
    PyTree,
    bits_as_keys,
    chunks,
    keys_as_bits,
    leaf_names,
    on_device,
    overlaid,
    unchanged,
)

Move: TypeAlias = Callable[[PyTree], PyTree]


class Difference(NamedTuple):
    """A leaf that is not the same on all replicas."""

    leaf: str
    replicas: tuple[int, ...]  # those that differ from the majority, or from replica 0 if there is none
    source: int | None  # a replica of the majority; None if no value is held by more than half


class Sentinel(NamedTuple):
    """Functions that compare the replicas of one kind of state, compiled at their first use."""

    spec: PyTree  # PartitionSpec prefix of the state: what is kept per replica is not compared
    fingerprints: Callable[[PyTree], np.ndarray]
    """tree -> uint32 (R, number of replicated leaves, 2), the same on every rank.

    Two sums over a leaf's elements modulo 2^32: of their bits, in which one changed element always shows, and
    of a hash of bits and position, in which several changes, or swapped elements, show."""
    heal: Callable[[PyTree, np.ndarray], PyTree]
    """(tree, sources) -> tree in which replicated leaf i has the value of replica sources[i]."""


def replicated_part(tree: PyTree, spec: PyTree) -> PyTree:
    """`tree` with None in place of leaves that are kept per replica."""
    return by_spec(lambda leaf, s: leaf if s == REPLICATED else None, tree, spec)


def replicated_names(tree: PyTree, spec: PyTree) -> list[str]:
    """Names of the replicated leaves, such as `params/Dense_0/kernel`, in the order of `fingerprints`."""
    return leaf_names(replicated_part(tree, spec))


def build_sentinel(mesh: Mesh, spec: PyTree, fetch: Move = unchanged, stow: Move = unchanged) -> Sentinel:
    """For states placed as `spec` says on `mesh`. fetch, stow: see `Sync`."""

    def local_heal(tree: PyTree, sources: jax.Array) -> PyTree:
        tree = keys_as_bits(tree)
        leaves, shape = jax.tree.flatten(replicated_part(tree, spec))
        chosen = [held_by(source, leaf) for leaf, source in zip(leaves, sources, strict=True)]
        return bits_as_keys(overlaid(jax.tree.unflatten(shape, chosen), tree))

    sums = _build_sums(mesh)
    heal = model_map(local_heal, mesh, (spec, REPLICATED), spec)

    def fingerprints(tree: PyTree) -> np.ndarray:
        parts = chunks(jax.tree.leaves(replicated_part(tree, spec)))
        # Read one after another: collectives of programs that run side by side could meet in another order.
        return np.concatenate([local_value(sums(chunk)) for chunk in parts], axis=1)

    @jax.jit
    def healed(tree: PyTree, sources: jax.Array) -> PyTree:
        return stow(heal(fetch(tree), sources))

    return Sentinel(spec, fingerprints, healed)


@lru_cache(maxsize=8)  # a second fit with leaves of the same shapes on the same devices compiles nothing
def _build_sums(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """A function (replicated leaves) -> uint32 (R, leaves, 2), their sums as in `Sentinel.fingerprints`."""

    def local_sums(leaves: list[jax.Array]) -> jax.Array:
        sums = jax.tree.leaves(jax.tree.map(_sums, keys_as_bits(leaves)))
        return lax.all_gather(jnp.stack(sums).reshape(-1, 2), AXIS)

    gathered = model_map(local_sums, mesh, REPLICATED, REPLICATED)
    return jax.jit(lambda leaves: gathered([on_device(leaf) for leaf in leaves]))


def differences(prints: np.ndarray, names: list[str]) -> list[Difference]:
    """The leaves whose fingerprints (R, leaves, 2) differ between replicas."""
    different = np.flatnonzero((prints != prints[:1]).any(axis=(0, 2)))
    return [_judge(prints[:, leaf], names[leaf]) for leaf in different]


def _judge(prints: np.ndarray, name: str) -> Difference:
    values, which, counts = np.unique(prints, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    most = int(counts.argmax())
    agreed = counts[most] * 2 > len(prints)
    wanted = most if agreed else which[0]
    source = int(np.flatnonzero(which == most)[0]) if agreed else None
    return Difference(name, tuple(np.flatnonzero(which != wanted).tolist()), source)


@jax.jit  # traced and lowered once for all leaves of one shape
def _sums(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Source of the hash: the finalizer of MurmurHash3 (Appleby 2011), without its last steps."""
    bits = _bits(leaf).astype(jnp.uint32).reshape(-1)
    # Each step loses no bit of an element. Without the shifts, changes of the highest bits of two elements
    # would cancel each other in the sum.
    mixed = bits * (lax.iota(jnp.uint32, bits.size) * jnp.uint32(2) + jnp.uint32(1))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = mixed ^ (mixed >> 13)
    none = jnp.uint32(0)
    # Both in one pass over the leaf, without intermediate arrays: 16 times as fast for 80 MB on 2 cores.
    return lax.reduce((bits, mixed), (none, none), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,))


def _bits(leaf: jax.Array) -> jax.Array:
    """The bits of `leaf` as unsigned integers; two per 64-bit element, along a last dimension. For complex
    numbers, the bits of both parts."""
    if jnp.iscomplexobj(leaf):
        return _bits(jnp.stack([leaf.real, leaf.imag]))
    bits = to_bits(leaf)
    return lax.bitcast_convert_type(bits, jnp.uint32) if leaf.dtype.itemsize == 8 else bits
