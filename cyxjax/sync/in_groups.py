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
from cyxjax.core.trees import PyTree, leaf_names, matches, overlaid
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


def in_groups(syncs: Mapping[Any, Sync], owner: PyTree) -> Sync:
    """One strategy made of several of one kind. State: {group: state}.

    owner: a tree like params of the keys of `syncs`. Each of `syncs` is made for the tree with None in place
    of the other groups' leaves, so each clips and scales by its own gradients only.
    """
    first = next(iter(syncs.values()))

    def of(tree: PyTree, name: Any) -> PyTree:
        return part_of(tree, owner, name)

    def each(call: str, tree: PyTree, *more: Any) -> PyTree:
        return overlaid(*[getattr(sync, call)(of(tree, name), *more) for name, sync in syncs.items()])

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        done = {
            name: Stepped(*sync.update(of(grads, name), state[name], of(params, name)))
            for name, sync in syncs.items()
        }
        means = [one.mean_grads for one in done.values()]
        return Stepped(
            overlaid(*[one.params for one in done.values()]),
            {name: one.state for name, one in done.items()},
            None if any(mean is None for mean in means) else overlaid(*means),
            any(one.in_parts for one in done.values()),
        )

    def stored_as(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        stored = {name: sync.stored_as(state[name], of(params, name)) for name, sync in syncs.items()}
        states = {name: inner for name, (inner, _) in stored.items()}
        return states, overlaid(*[kept for _, kept in stored.values()])

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


def part_of(tree: PyTree, owner: PyTree, group: Any = True) -> PyTree:
    """The leaves of `tree` whose owner is `group`; None in place of the others."""
    return jax.tree.map(lambda one, leaf: leaf if one == group else None, owner, tree)


def for_part(sync: Sync, still: Sync, chosen: PyTree) -> Sync:
    """`sync` for the chosen leaves; the others are kept as `still` keeps them, and never change.

    sync, still: each is made for the tree with None in place of the other's leaves. The state is that of
    `sync`.
    """
    if not sync.keeps_parts:
        still = still._replace(consensus=partial(_same, sync))
    both = in_groups({True: sync, False: still}, chosen)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        stepped = Stepped(*sync.update(part_of(grads, chosen), state, part_of(params, chosen)))
        return stepped._replace(params=overlaid(stepped.params, part_of(params, chosen, False)))

    def stored_as(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        states, kept = both.stored_as({True: state, False: ()}, params)
        return states[True], kept

    return both._replace(
        init=lambda params: sync.init(part_of(params, chosen)),
        update=update,
        state_spec=sync.state_spec,
        stored_as=stored_as,
    )


def _same(sync: Sync, params: PyTree) -> PyTree:
    """`params`, equal on all replicas, as replicated; bit for bit, since a mean of equals may round."""
    return params if sync.params_spec == REPLICATED else jax.tree.map(partial(held_by, 0), params)
