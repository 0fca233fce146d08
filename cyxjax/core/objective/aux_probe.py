"""Whether what a loss gives beside its values is meant as weights: asked of outputs made up for it.

jax's habit is `(loss, aux)`; a step's is `(values, weights)`. Hits or predictions in the second place would
train on what the model has right already, and say nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from cyxjax.errors import ConfigError

PyTree = Any


def refuse_hits(second: Callable, probes: Iterable[tuple[PyTree, PyTree]]) -> None:
    """Returns unless `second`, (output, target) -> what stands beside the values, is for every probe what the
    model predicts, or whether that is right. A mask may come of both, but not be the one or the other.

    Raises: ConfigError.
    """
    run, could_be, seen = jax.jit(second), {"hits", "predictions"}, set[float]()
    for output, target in probes:
        weights = np.asarray(run(output, target)).astype(np.float64)
        seen.update(np.unique(weights)[:2].tolist())
        guesses = _guesses(output, target, weights.shape)
        could_be &= {name for name, guess in guesses if (guess == weights).all()}
        if not could_be:
            return
    if len(seen) > 1:  # else nothing tells them from a constant
        what = "whether the prediction is right" if "hits" in could_be else "the prediction itself"
        raise ConfigError(
            f"the loss gives a pair, and its second part is {what}: a step would weigh the samples by it. "
            "HINT: return the loss alone; accuracy is measured anyway, other things by cx.Metrics({...})."
        )


def _guesses(output: PyTree, target: PyTree, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """("hits" or "predictions", what they would be), of all arrays in question that have this shape."""
    classes: list[np.ndarray] = []
    for leaf in (np.asarray(one, np.float64) for one in jax.tree.leaves(output)):
        if leaf.ndim and leaf.shape[:-1] == shape and leaf.shape[-1] > 1:
            classes.append(leaf.argmax(-1))
        elif leaf.size == np.prod(shape):
            flat = leaf.reshape(shape)
            classes += [flat > 0, flat > 0.5, np.sign(flat)]
    for found in classes:
        yield "predictions", found
        for labels in (np.asarray(one) for one in jax.tree.leaves(target)):
            if labels.shape == shape:
                yield "hits", found == labels
            elif labels.shape[:-1] == shape and labels.shape[-1] > 1:
                yield "hits", found == labels.argmax(-1)
            elif labels.size == np.prod(shape):
                yield "hits", found == labels.reshape(shape)
