"""Whether a metric gives a value a sample, or sums over samples: asked before training (`loss_probe`)."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.losses import each_alone
from cyxjax.core.objective.foreign_metrics import as_statistic, is_foreign, state_of
from cyxjax.core.objective.host import on_host
from cyxjax.core.objective.loss_probe import of_pair, traced
from cyxjax.core.objective.probes import num_samples, probes
from cyxjax.core.objective.untraced import compiled
from cyxjax.core.statistics import Statistic
from cyxjax.core.trees import batch_shapes
from cyxjax.errors import ConfigError, CyxjaxError

PyTree = Any
_CLOSE = 0.03  # half precision rounds two ways to a number that far apart


def refuse_unless_of_samples(metrics: Mapping[str, Any], output: PyTree, target: PyTree) -> None:
    """Returns for metrics that give a value a sample, which depends on this sample alone, or pairs of those;
    and for statistics whose states add up.

    One number for a batch has the padding in it, and is another one for each number of replicas.
    output, target: as of `refuse_unless_mean`. Raises: ConfigError naming the metric.
    """
    size = num_samples(output)
    shapes = batch_shapes(output, size), batch_shapes(target, size)
    for name, metric in metrics.items():
        statistic = as_statistic(name, metric)
        if statistic is not None:
            _refuse_unless_sums(name, metric, statistic, output, target, size)
            continue
        if hasattr(metric, "of_rows"):
            continue
        if not traced(metric, *shapes):
            with compiled(f"metric {name!r}"):
                jax.eval_shape(metric, *shapes)  # says why
        form = jax.eval_shape(metric, *shapes)
        if form is None:
            continue
        parts = form if isinstance(form, tuple) else (form,)
        shapes_of = [tuple(getattr(part, "shape", ())) for part in parts]
        fits = [shape[:1] == (size,) and shape == shapes_of[0] for shape in shapes_of]
        if len(parts) > 2 or not all(fits) or (len(parts) == 1 and len(shapes_of[0]) > 1):
            raise _no_metric(name, f"gives {' and '.join(map(str, shapes_of))} for {size} samples")
        for part in of_pair(metric) if isinstance(form, tuple) else (metric,):
            _refuse_coupled(name, part, output, target, size)
        if isinstance(form, tuple):
            _refuse_negative(name, of_pair(metric)[1], output, target, size)


def _refuse_coupled(name: str, metric: Callable, output: PyTree, target: PyTree, size: int) -> None:
    with on_host():
        both = jax.jit(lambda o, t: (metric(o, t).astype(jnp.float32), _alone(metric, o, t)))
        for outputs, targets in islice(probes(output, target, size), 2):
            whole, alone = (np.asarray(values) for values in both(outputs, targets))
            odd = np.isfinite(whole) & ~np.isclose(whole, alone, rtol=_CLOSE, atol=1e-5)
            if odd.any():
                raise _no_metric(
                    name,
                    f"is {whole[odd][0]:.4g} for a sample in a batch of {size} and {alone[odd][0]:.4g} alone",
                )


def _refuse_negative(name: str, weights: Callable, output: PyTree, target: PyTree, size: int) -> None:
    with on_host():
        run = jax.jit(weights)
        least = min(float(np.min(np.asarray(run(*probe)))) for probe in probes(output, target, size))
    if least < 0:
        raise ConfigError(
            f"metric {name!r} weighs a sample {least:.4g}; a mean takes weights of 0 and more. HINT: put the "
            "sign into the values."
        )


def _refuse_unless_sums(
    name: str, metric: Any, statistic: Statistic, output: PyTree, target: PyTree, size: int
) -> None:
    """The state of all samples is the sum of that of two parts, padding or not, and `merge` says so too."""
    cut, weight = size // 2, np.ones(size, np.float32)

    def update(rows: slice, weight: Any, o: PyTree, t: PyTree) -> PyTree:
        o, t = jax.tree.map(lambda a: a[rows] if a.ndim else a, (o, t))
        return statistic.update(statistic.init(), o, t, jnp.asarray(weight[rows]))

    def states(o: PyTree, t: PyTree) -> tuple[PyTree, ...]:
        padded = np.where(np.arange(size) < cut, weight, 0)
        halves = update(slice(cut), weight, o, t), update(slice(cut, size), weight, o, t)
        added = jax.tree.map(jnp.add, *halves)
        all_rows = slice(size)
        own = state_of(name, metric, o, t) if is_foreign(metric) else added
        return (
            statistic.merge(*halves),
            added,
            update(all_rows, weight, o, t),
            own,
            halves[0],
            update(all_rows, padded, o, t),
        )

    with on_host():
        run = jax.jit(states)
        try:
            jax.eval_shape(states, batch_shapes(output, size), batch_shapes(target, size))
        except CyxjaxError:
            raise
        except Exception as err:  # whatever a user's function raises
            what = " ".join(str(err).split())[:200]
            raise ConfigError(
                f"metric {name!r} cannot be updated: {type(err).__name__}: {what} HINT: update(state, "
                "output, target, weight) and merge give states of the shapes that init gives."
            ) from err
        for probe in islice(probes(output, target, size), 2):
            merged, added, whole, own, half, padded = run(*probe)
            if not _alike(half, padded):
                raise _no_statistic(name, "counts rows whose weight is 0, which are padding")
            if not (_alike(merged, added) and _alike(whole, added) and _alike(own, added)):
                raise _no_statistic(name, "has a state of two batches that is not the sum of theirs")


def _alike(one: PyTree, other: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in pairs)


def _no_statistic(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"metric {name!r} {what}: a step adds up what replicas and steps have. HINT: a state of weighted "
        "sums over samples; compute what has none (a median, all values) from trainer.predict."
    )


def _alone(metric: Callable, output: PyTree, target: PyTree) -> jax.Array:
    return each_alone(metric, output, target).astype(jnp.float32).reshape(-1)


def _no_metric(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"metric {name!r} {what}: its mean would have padding in it and change with the number of replicas. "
        "HINT: return one value a sample, shape (B,), or the pair (values, weights); what needs all samples "
        "is a cx.Statistic (cx.F1, cx.AUC), or computed from trainer.predict."
    )
