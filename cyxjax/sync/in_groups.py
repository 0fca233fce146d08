"""Strategies for some of the parameters: groups with a strategy each, and parameters that do not change.

gradients -> the leaves of a group -> its strategy -> that group's parameters and state, new or unchanged"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cyxjax.core.collectives import held_by
from cyxjax.core.mesh import REPLICATED
from cyxjax.core.strategy import Stepped, Sync, stepped_if, stored_inside
from cyxjax.core.trees import PyTree, joined, leaf_names, matches
from cyxjax.errors import ConfigError


class Turns(NamedTuple):
    count: Any  # int32 (): steps of the run that were not left out
    inner: PyTree  # the strategy's state


def in_turn(sync: Sync, every: int, offset: int) -> Sync:
    """`sync` in the steps s with s % every == offset; in others its parameters and state do not change."""
    if every == 1:
        return sync

    def update(grads: PyTree, state: Turns, params: PyTree) -> Stepped:
        due = state.count % every == offset
        new = stepped_if(due, sync, grads, state.inner, params)
        return new._replace(state=Turns(state.count + 1, new.state))

    return sync._replace(
        init=lambda params: Turns(jnp.int32(0), sync.init(params)),
        update=update,
        state_spec=Turns(REPLICATED, sync.state_spec),
        stored_as=stored_inside(sync),
    )


def in_groups(syncs: Mapping[str, Sync], owner: PyTree) -> Sync:
    """One strategy made of several of one kind. State: {group: state}.

    owner: a tree like params of the names of groups. Each of `syncs` is made for the tree with None in place
    of the other groups' leaves, so each clips and scales by its own gradients only.
    """
    first = next(iter(syncs.values()))

    def of(tree: PyTree, name: str) -> PyTree:
        return jax.tree.map(lambda group, leaf: leaf if group == name else None, owner, tree)

    def each(call: str, tree: PyTree, *more: Any) -> PyTree:
        return joined(*[getattr(sync, call)(of(tree, name), *more) for name, sync in syncs.items()])

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        done = {
            name: Stepped(*sync.update(of(grads, name), state[name], of(params, name)))
            for name, sync in syncs.items()
        }
        means = [one.mean_grads for one in done.values()]
        return Stepped(
            joined(*[one.params for one in done.values()]),
            {name: one.state for name, one in done.items()},
            None if any(mean is None for mean in means) else joined(*means),
            any(one.in_parts for one in done.values()),
        )

    def stored_as(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        stored = {name: sync.stored_as(state[name], of(params, name)) for name, sync in syncs.items()}
        states = {name: inner for name, (inner, _) in stored.items()}
        return states, joined(*[kept for _, kept in stored.values()])

    made = first._replace(
        init=lambda params: {name: sync.init(of(params, name)) for name, sync in syncs.items()},
        update=update,
        state_spec={name: sync.state_spec for name, sync in syncs.items()},
        consensus=lambda params: each("consensus", params),
        hold=lambda params: each("hold", params),
        stored_as=stored_as,
    )
    return (
        made._replace(whole=lambda params, dtype: each("whole", params, dtype)) if first.keeps_parts else made
    )


def trained(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """A tree like `params` of bools: whether a leaf's name (`Dense_0/kernel`) matches one of `patterns`.

    Without patterns all are True. `*` stands for any text.
    Raises: ConfigError for a pattern that matches no leaf.
    """
    names = leaf_names(params)
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ConfigError(
                f"trainable: {pattern!r} matches no parameter. HINT: write names such as "
                f"{', '.join(names[:6])}; * matches any text.",
                key="trainable",
            )
    chosen = [not patterns or matches(name, patterns) for name in names]
    return jax.tree.unflatten(jax.tree.structure(params), chosen)


def part_of(tree: PyTree, chosen: PyTree, which: bool = True) -> PyTree:
    """The leaves of `tree` that are `chosen` (which=False: those that are not); None for the rest."""
    return jax.tree.map(lambda mine, leaf: leaf if mine is which else None, chosen, tree)


def for_part(sync: Sync, still: Sync, chosen: PyTree) -> Sync:
    """`sync` for the chosen leaves; the others are kept as `still` keeps them, and never change.

    sync, still: each is made for the tree with None in place of the other's leaves.
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
    """`params`, equal on all replicas, as replicated; bit for bit, since a mean of equals may round."""
    return params if sync.params_spec == REPLICATED else jax.tree.map(partial(held_by, 0), params)
