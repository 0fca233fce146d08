"""Parameters that stay as they are: the strategy sees, sends and keeps a state for the others alone."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cyxjax.core.mesh import AXIS, REPLICATED
from cyxjax.core.strategy import Stepped, Sync
from cyxjax.core.trees import leaf_names, matches
from cyxjax.errors import ConfigError

PyTree = Any


def trained(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """`params`' tree of bools: whether a leaf's name (`Dense_0/kernel`) matches one of `patterns`, if any.

    `*` stands for any text. Raises: ConfigError for a pattern that matches no leaf.
    """
    names = leaf_names(params)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            few = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ConfigError(
                f"trainable: {pattern!r} matches no parameter. HINT: names are {few}; * is any text.",
                key="trainable",
            )
    chosen = [not patterns or matches(name, patterns) for name in names]
    return jax.tree.unflatten(jax.tree.structure(params), chosen)


def part_of(tree: PyTree, chosen: PyTree, which: bool = True) -> PyTree:
    """The leaves of `tree` that are `chosen`, None in place of the others (which=False: these)."""
    return jax.tree.map(lambda mine, leaf: leaf if mine is which else None, chosen, tree)


def joined(one: PyTree, other: PyTree) -> PyTree:
    """The tree of which `one` and `other` are parts."""
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)


def for_part(sync: Sync, still: Sync, chosen: PyTree) -> Sync:
    """`sync` for the chosen leaves; the others are kept as `still` keeps them, and never change.

    sync, still: made for the tree with None in place of the other one's leaves.
    """
    mine = lambda tree: part_of(tree, chosen)  # noqa: E731
    rest = lambda tree: part_of(tree, chosen, False)  # noqa: E731

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        stepped = Stepped(*sync.update(mine(grads), state, mine(params)))
        return stepped._replace(params=joined(stepped.params, rest(params)))

    def consensus(params: PyTree) -> PyTree:
        kept = still.consensus(rest(params)) if sync.keeps_parts else _same(rest(params), sync)
        return joined(sync.consensus(mine(params)), kept)

    def stored_as(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        inner, moved = sync.stored_as(state, mine(params))
        return inner, joined(moved, still.stored_as((), rest(params))[1])

    made = sync._replace(
        init=lambda params: sync.init(mine(params)),
        update=update,
        consensus=consensus,
        hold=lambda params: joined(sync.hold(mine(params)), still.hold(rest(params))),
        stored_as=stored_as,
    )
    if not sync.keeps_parts:
        return made
    whole = lambda parts, dtype: joined(sync.whole(mine(parts), dtype), still.whole(rest(parts), dtype))  # noqa: E731
    return made._replace(whole=whole)


def _same(params: PyTree, sync: Sync) -> PyTree:
    """Replicated, what all replicas hold alike: a mean of equal numbers may round to another."""
    if sync.params_spec == REPLICATED:
        return params

    def one(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return lax.complex(lax.pmax(leaf.real, AXIS), lax.pmax(leaf.imag, AXIS))
        return lax.pmax(leaf, AXIS)

    return jax.tree.map(one, params)
