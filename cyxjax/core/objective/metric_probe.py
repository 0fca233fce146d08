"""Whether a metric gives a value a sample: asked before training, as of a loss (`loss_probe`)."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.losses import each_alone
from cyxjax.core.objective.loss_probe import num_samples, of_pair, on_host, probes, resized, traced
from cyxjax.errors import ConfigError

PyTree = Any
_CLOSE = 0.03  # half precision rounds two ways to a number that far apart


def refuse_unless_of_samples(metrics: Mapping[str, Any], output: PyTree, target: PyTree) -> None:
    """Returns for metrics that give a value a sample, which depends on this sample alone, or pairs of those.

    One number for a batch has the padding in it, and is another one for each number of replicas.
    output, target: as of `refuse_unless_mean`. Raises: ConfigError naming the metric.
    """
    size = num_samples(output)
    shapes = resized(output, size), resized(target, size)
    for name, metric in metrics.items():
        if hasattr(metric, "of_rows") or not traced(metric, *shapes):
            continue  # the step says why
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


def _alone(metric: Callable, output: PyTree, target: PyTree) -> jax.Array:
    return each_alone(metric, output, target).astype(jnp.float32).reshape(-1)


def _no_metric(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"metric {name!r} {what}: its mean would have padding in it and change with the number of replicas. "
        "HINT: return one value a sample, shape (B,), or the pair (values, weights); compute what needs all "
        "samples (F1, AUC) from trainer.predict."
    )
