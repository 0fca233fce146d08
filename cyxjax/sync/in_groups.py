"""Parameters in groups, each with a strategy of its own: its optimizer, its norm to be clipped, its turns.

gradients -> the leaves of a group -> its strategy -> that group's parameters and state, or those of before
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cyxjax.core.mesh import REPLICATED
from cyxjax.core.strategy import Stepped, Sync

PyTree = Any


class Turns(NamedTuple):
    count: Any  # int32 (): steps of the run that were not left out
    inner: PyTree  # the strategy's state


def in_turn(sync: Sync, every: int, offset: int) -> Sync:
    """`sync` in the steps s with s % every == offset; in the others its parameters and its state rest."""
    if every == 1:
        return sync

    def update(grads: PyTree, state: Turns, params: PyTree) -> Stepped:
        due = state.count % every == offset
        new = Stepped(*sync.update(grads, state.inner, params))
        # A choice of results, not of branches: what is summed over replicas must be so in every step.
        moved, inner = jax.tree.map(lambda n, old: jnp.where(due, n, old), new[:2], (params, state.inner))
        return new._replace(params=moved, state=Turns(state.count + 1, inner))

    def stored_as(state: Turns, params: PyTree) -> tuple[PyTree, PyTree]:
        inner, params = sync.stored_as(state.inner, params)
        return Turns(state.count, inner), params

    return sync._replace(
        init=lambda params: Turns(jnp.int32(0), sync.init(params)),
        update=update,
        state_spec=Turns(REPLICATED, sync.state_spec),
        stored_as=stored_as,
    )


def in_groups(syncs: Mapping[str, Sync], owner: PyTree) -> Sync:
    """One strategy made of several of one kind. State: {group: state}.

    owner: params' tree of the names of groups. Each of `syncs` is made for the tree with None in place of the
    other groups' leaves, so what one clips or scales by is of its own gradients.
    """
    first = next(iter(syncs.values()))

    def of(tree: PyTree, name: str) -> PyTree:
        return jax.tree.map(lambda group, leaf: leaf if group == name else None, owner, tree)

    def each(call: str, tree: PyTree, *more: Any) -> PyTree:
        return _joined([getattr(sync, call)(of(tree, name), *more) for name, sync in syncs.items()])

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        done = {
            name: Stepped(*sync.update(of(grads, name), state[name], of(params, name)))
            for name, sync in syncs.items()
        }
        means = [one.mean_grads for one in done.values()]
        return Stepped(
            _joined([one.params for one in done.values()]),
            {name: one.state for name, one in done.items()},
            None if any(mean is None for mean in means) else _joined(means),
            any(one.in_parts for one in done.values()),
        )

    def stored_as(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        stored = {name: sync.stored_as(state[name], of(params, name)) for name, sync in syncs.items()}
        states = {name: inner for name, (inner, _) in stored.items()}
        return states, _joined([kept for _, kept in stored.values()])

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


def _joined(parts: list[PyTree]) -> PyTree:
    """The tree of which each of `parts` holds some leaves, and None in place of the others."""

    def there(*leaves: Any) -> Any:
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(there, *parts, is_leaf=lambda leaf: leaf is None)
