"""An optimizer whose state holds numbers alone: a typed PRNG key (optax.add_noise) is kept as its key data.

A typed key has no place in a checkpoint, and no bits to compare between replicas.
"""

from typing import Any

import jax
import optax

PyTree = Any


def with_raw_keys(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, its updates to the bit; for one without typed keys its state too."""

    def init(params: PyTree) -> PyTree:
        return _as_numbers(optimizer.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        kinds = _kinds(optimizer, updates if params is None else params)
        if not any(kinds):
            return optimizer.update(updates, state, params, **extra)
        leaves, shape = jax.tree.flatten(state)
        typed = [_typed(leaf, kind) for leaf, kind in zip(leaves, kinds, strict=True)]
        updates, after = optimizer.update(updates, jax.tree.unflatten(shape, typed), params, **extra)
        return updates, _as_numbers(after)

    return optax.GradientTransformationExtraArgs(init, update)


def _kinds(optimizer: optax.GradientTransformation, params: PyTree) -> list[Any]:
    """What each leaf of the state is a key of; None for numbers."""
    kinds: list[Any] = []

    def note(params: PyTree) -> None:
        leaves = jax.tree.leaves(optimizer.init(params))
        kinds.extend(jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves)

    jax.eval_shape(note, params)
    return kinds


def _as_numbers(state: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)


def _typed(leaf: Any, kind: Any) -> Any:
    return leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key)
