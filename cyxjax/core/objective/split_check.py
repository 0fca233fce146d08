"""Checks on the training batches that a loss or metric is a mean of per-sample values.

A step that has the whole batch uses the user's function as it is. Where the batch is split (replicas,
micro-batches, parts of an exact step), a function that returns one number is called for each sample and the
results are averaged; per-sample values are used as they are. Both are right unless the function couples
samples or divides by a property of the batch. So the function is also computed for one sample at a time; the
difference travels with the sums of the step, and the host ends the run at the first step where it is more
than rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cyxjax.core.losses import UserLoss, model_loss
from cyxjax.core.metrics import Metrics
from cyxjax.core.objective.terms import terms_of
from cyxjax.core.rows import WAYS_OUT, by_sample, mean_of_each, row_by_row
from cyxjax.core.statistics import Statistic
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError

_ROUNDING, _HALF_PRECISION = 1e-4, 0.03  # relative to the size of the values
_OF_LARGEST = 1e-5  # differences below this part of the largest values of the run are rounding errors


class SplitCheck(NamedTuple):
    """The user's functions that a step compares, by name; each takes one row of the step's sums."""

    measures: dict[str, Callable[[PyTree, PyTree], Any]] = {}

    def rows(self, output: PyTree, target: PyTree) -> jax.Array:
        """float32 (number of measures, 2): the largest difference (0 if it is rounding) and the mean size of
        a sample's value; a step adds both up.

        Padding holds copies of samples, so it is compared as any other row.
        """
        # The step's own numbers keep their bits: XLA fuses none of their operations with those of the check.
        output, target = lax.optimization_barrier((output, target))
        found = [_compared(measure, output, target) for measure in self.measures.values()]
        return lax.stop_gradient(jnp.stack(found))

    def watch(self) -> Callable[[np.ndarray], None]:
        """A function to call with the `rows` of each step (empty where the step had the whole batch).

        It raises ConfigError naming the loss or metric that differs.
        """
        largest = np.zeros(len(self.measures))

        def look(rows: np.ndarray) -> None:
            if not len(rows):
                return
            np.maximum(largest, rows[:, 1], out=largest)
            for name, (difference, size), known in zip(self.measures, rows, largest, strict=True):
                if difference > _OF_LARGEST * known:
                    raise _differs(name, difference / size if size else np.inf)

        return look


def split_check(loss: Any, metrics: Metrics) -> SplitCheck:
    """The check of those losses (or terms) and metrics that are the user's functions."""
    terms = terms_of(loss)
    # several terms are measured by their names too
    named = {term.name for term in terms} if len(terms) > 1 else set()
    found: dict[str, Callable] = {}
    for term in terms:
        if isinstance(term.loss, UserLoss) and term.loss.fn is not model_loss:
            found[f"the loss {term.name!r}" if named else "the loss"] = term.loss
    for name, metric in metrics.own.items():
        if name not in named and not isinstance(metric, Statistic) and not hasattr(metric, "of_rows"):
            found[f"the metric {name!r}"] = metric
    return SplitCheck(found)


def is_own(loss: Any, metrics: Metrics) -> bool:
    """Whether the loss, one of its terms or a metric is a function of the user or of the model.

    Such a function may depend on the whole batch, so it gets no padding where one replica has it all.
    """
    of_model = any(isinstance(term.loss, UserLoss) for term in terms_of(loss))
    return of_model or bool(split_check(loss, metrics).measures)


def _compared(measure: Callable, output: PyTree, target: PyTree) -> jax.Array:
    """float32 (2,): see `SplitCheck.rows`; zeros for a metric that returns None."""
    given = measure(output, target)
    if given is None:
        return jnp.zeros(2)
    halves = [leaf.dtype for leaf in jax.tree.leaves((given, output)) if leaf.dtype.itemsize == 2]
    relative = _HALF_PRECISION if any(jnp.issubdtype(one, jnp.inexact) for one in halves) else _ROUNDING
    alone = row_by_row(lambda o, t: _values(measure(o, t)), output, target)
    pairs = zip(_values(given), alone, strict=True)
    compared = [_difference(together, each.reshape(-1), relative) for together, each in pairs]
    return jnp.stack([sum(one[0] for one in compared), compared[0][1]])


def _values(given: Any) -> list[jax.Array]:
    """[one number or (B,)]; for a pair, [values times weights, weights]."""
    if isinstance(given, tuple):
        values, weights = by_sample(*given)
        return [values * weights, weights]
    return [mean_of_each(given) if given.ndim else given.astype(jnp.float32)]


def _difference(together: jax.Array, alone: jax.Array, relative: float) -> tuple[jax.Array, jax.Array]:
    """(the largest difference that is more than rounding, mean size of a sample's value)."""
    size = jnp.abs(alone).mean()
    alone = alone if together.ndim else alone.mean()
    difference = jnp.abs(together - alone)
    # `on_nonfinite` handles a batch that is not finite; a single sample that is not finite differs.
    differs = jnp.isfinite(together) & ~(difference <= relative * (jnp.abs(alone) + size))
    difference = jnp.where(jnp.isfinite(difference), difference, jnp.inf)
    return jnp.where(differs, difference, 0.0).max(), jnp.where(jnp.isfinite(size), size, 0.0)


def _differs(name: str, part: float) -> ConfigError:
    """part: the difference, as a part of a sample's value."""
    is_metric = name.startswith("the metric")
    ways = "return one value per sample, shape (B,), or write a cx.Statistic" if is_metric else WAYS_OUT
    return ConfigError(
        f"{name} of a batch is not a mean of per-sample values: computed for one sample at a time it differs "
        f"by {100 * part:.3g} % of a sample's value. The batch is split over replicas, micro-batches or "
        f"parts, which would change the result. HINT: {ways}.",
        key="metrics" if is_metric else "loss",
    )
