"""Batches made up to ask a loss or a metric about: outputs of several kinds, with targets that were given."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

_LARGE = 2**20


def num_samples(output: PyTree) -> int:
    """8, or 2 where one sample's output is large (logits of a long text)."""
    largest = max((int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(output)), default=1)
    return 8 if largest < _LARGE else 2


def probes(output: PyTree, target: PyTree, size: int) -> Iterator[tuple[PyTree, PyTree]]:
    """Batches of `size`: outputs of several kinds, as a loss may want logits, probabilities or their logs."""
    rng = np.random.default_rng(0)
    order = rng.permutation(max((len(leaf) for leaf in jax.tree.leaves(target)), default=1))
    for make in (_logits, _probabilities, _log_probabilities):
        for first in range(0, min(len(order), 4 * size), size):  # all targets that were given have their turn
            outputs = jax.tree.map(lambda leaf: _leaf(make, rng, size, leaf), output)  # noqa: B023
            rows = order[np.arange(first, first + size) % len(order)]
            targets = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], target)  # noqa: B023
            yield outputs, targets
        yield outputs, _made_up(rng, targets, output)


def _leaf(make: Callable, rng: np.random.Generator, size: int, like: Any) -> np.ndarray:
    shape = (size, *like.shape[1:]) if like.shape else ()
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return rng.integers(0, 2, shape).astype(like.dtype)
    if not shape:  # a scale, a temperature: above 0
        return np.asarray(0.5 + rng.random(), like.dtype)
    # Samples of unlike size: a loss that weighs samples shows it where their losses differ.
    scale = np.linspace(0.5, 3, size, dtype=np.float32).reshape(size, *[1] * (len(shape) - 1))
    return make(scale * rng.standard_normal(shape, np.float32)).astype(like.dtype)


def _logits(values: np.ndarray) -> np.ndarray:
    return values


def _probabilities(values: np.ndarray) -> np.ndarray:
    e = np.exp(values)
    return e / (1 + e) if values.ndim < 2 or values.shape[-1] == 1 else e / e.sum(-1, keepdims=True)


def _log_probabilities(values: np.ndarray) -> np.ndarray:
    return np.log(_probabilities(values))


def nudged(tree: PyTree) -> PyTree:
    """`tree` moved by about one rounding, up and down in turn: what changes then is noise."""

    def nudge(a: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a
        signs = np.resize(np.array([1, -1, -1], np.float32), a.shape)
        return (a * (1 + 2 * np.float32(jnp.finfo(a.dtype).eps) * signs)).astype(a.dtype)

    return jax.tree.map(nudge, tree)


def _made_up(rng: np.random.Generator, target: PyTree, output: PyTree) -> PyTree:
    """Rows whose integers are drawn anew among those seen, and among the classes where they are labels."""
    classes = [leaf.shape[1:] for leaf in jax.tree.leaves(output) if len(leaf.shape) > 1]

    def redraw(leaf: np.ndarray) -> np.ndarray:
        if leaf.dtype.kind not in "iu":
            return leaf
        counts = [shape[-1] for shape in classes if shape[:-1] == leaf.shape[1:]]
        low, high = int(leaf.min()), int(leaf.max()) + 1
        if counts and low >= 0:
            low, high = 0, max(high, counts[0])
        return rng.integers(low, high, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(redraw, target)
