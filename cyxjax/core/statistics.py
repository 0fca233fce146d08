"""Metrics that are not means of per-sample values, but functions of sums over samples.

Examples are F1, AUC, R2 and a confusion matrix. A step reduces these sums over replicas with all others, so
the result is that of the whole batch for any number of replicas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError


class Statistic(NamedTuple):
    """A metric computed from sums, for `cx.Metrics({"f1": cx.F1(10)})` or a `cx.Task`.

    Its state is a tree of numbers that add up: the state of two batches is the sum of their states, which
    `merge` must return. (A maximum or a median has no such state.)
    """

    init: Callable[[], PyTree]  # the state of no sample: zeros
    update: Callable[[PyTree, PyTree, PyTree, jax.Array], PyTree]
    """(state, output, target, weight (B,)) -> state; padding has weight 0 and must add nothing."""
    merge: Callable[[PyTree, PyTree], PyTree]
    compute: Callable[[PyTree], Any]  # in numpy: a number, {name: number} or an array
    better: str | None = None  # "min" or "max"


def of_sums(
    shape: tuple[int, ...],
    counted: Callable[[PyTree, PyTree, jax.Array], jax.Array],
    compute: Callable[[np.ndarray], Any],
    better: str | None = None,
) -> Statistic:
    """The statistic of one float32 array, to which a batch adds `counted(output, target, weight)`."""
    return Statistic(
        lambda: jnp.zeros(shape, jnp.float32),
        lambda state, output, target, weight: state + counted(output, target, weight),
        jnp.add,
        compute,
        better,
    )


@dataclass(frozen=True, eq=False)
class Packed:
    """A statistic as rows of a step's sums, float32 (num_rows, 2): its numbers, two per row."""

    name: str
    statistic: Statistic

    @cached_property
    def _form(self) -> PyTree:
        # Evaluated at first use: creating metrics must not start a device.
        return jax.eval_shape(self.statistic.init)

    @cached_property
    def num_rows(self) -> int:
        return -(-sum(leaf.size for leaf in jax.tree.leaves(self._form)) // 2)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers that the statistic gives; an array gives none that a run could watch."""
        nothing = self.values(np.zeros((self.num_rows, 2)))
        return tuple(name for name, value in nothing.items() if not isinstance(value, np.ndarray))

    def rows(self, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        """The rows of one batch. Raises: ConfigError if `update` returns another form than `init`."""
        state = self.statistic.update(self.statistic.init(), output, target, weight)
        if _shapes(state) != _shapes(self._form):
            raise ConfigError(
                f"metric {self.name!r}: update returns shapes {_shapes(state)[1]}, but init returns "
                f"{_shapes(self._form)[1]}. HINT: let init return zeros of the shapes that update returns."
            )
        flat = jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(state)])
        return jnp.pad(flat, (0, 2 * self.num_rows - flat.size)).reshape(-1, 2)

    def check_merge(self) -> None:
        """Returns if `merge` adds states up, as a step does. Raises: ConfigError otherwise."""
        rng = np.random.default_rng(0)
        drawn = lambda leaf: jnp.asarray(rng.integers(1, 9, leaf.shape), leaf.dtype)  # noqa: E731
        one, two = (jax.tree.map(drawn, self._form) for _ in range(2))
        merged, added = self.statistic.merge(one, two), jax.tree.map(jnp.add, one, two)
        pairs = zip(jax.tree.leaves(merged), jax.tree.leaves(added), strict=True)
        if not all(np.allclose(a, b) for a, b in pairs):
            raise ConfigError(
                f"metric {self.name!r}: merge does not return the sum of two states, as a step adds them up "
                "over replicas and batches. HINT: use weighted sums over samples as the state; compute a "
                "maximum or a median from trainer.predict.",
                key="metrics",
            )

    def values(self, rows: np.ndarray) -> dict[str, Any]:
        """name -> number or array, from summed rows; NaN where nothing was counted."""
        leaves, form = jax.tree.flatten(self._form)
        ends = np.cumsum([leaf.size for leaf in leaves])  # padding may come after the last
        parts = zip(np.split(np.asarray(rows).reshape(-1), ends), leaves, strict=False)
        state = [part.reshape(leaf.shape) for part, leaf in parts]
        with np.errstate(all="ignore"):
            made = self.statistic.compute(jax.tree.unflatten(form, state))
        if isinstance(made, Mapping):
            return {f"{self.name}_{key}": float(value) for key, value in made.items()}
        array = np.asarray(made)
        return {self.name: array if array.ndim else float(array)}


def _shapes(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]
