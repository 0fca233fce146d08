"""Metrics of clu and metrax, and objects with (init, update, merge, compute), as statistics."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.statistics import Statistic
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError

_PARTS = ("init", "update", "merge", "compute")
_FOREIGN = ("from_model_output", "merge", "compute", "empty")
_OUTPUT = ("logits", "predictions", "preds", "output", "outputs", "y_pred")
_TARGET = ("labels", "targets", "target", "y_true", "label")


def is_statistic(metric: Any) -> bool:
    """Whether `as_statistic` would make one of `metric`."""
    return is_foreign(metric) or all(callable(getattr(metric, part, None)) for part in _PARTS)


def is_foreign(metric: Any) -> bool:
    """Whether it is a class as clu and metrax have them, or a partial of one: its further keywords."""
    return all(callable(getattr(_kind(metric)[0], part, None)) for part in _FOREIGN)


def _kind(metric: Any) -> tuple[Any, dict[str, Any]]:
    """(class, further keywords of its from_model_output)."""
    if isinstance(metric, partial):
        return metric.func, metric.keywords
    return (metric if isinstance(metric, type) else type(metric)), {}


def as_statistic(name: str, metric: Any) -> Statistic | None:
    """`metric` as a statistic; None for a function, which gives a value a sample.

    Raises: ConfigError for what is neither.
    """
    if isinstance(metric, Statistic):
        return metric
    if is_foreign(metric):
        return _of_class(name, metric)
    if all(callable(getattr(metric, part, None)) for part in _PARTS):
        parts = (getattr(metric, part) for part in _PARTS)
        return Statistic._make([*parts, getattr(metric, "better", None)])
    if callable(metric) and not isinstance(metric, type):
        return None
    what = metric.__name__ if isinstance(metric, type) else type(metric).__name__
    raise ConfigError(
        f"metric {name!r} is {what}: neither a function (output, target) nor has it {', '.join(_PARTS)}, or "
        f"{', '.join(_FOREIGN)} as clu and metrax have them. HINT: a function, or a cx.Statistic."
    )


def unpacked(metrics: Any) -> dict[str, Any]:
    """A mapping as a dict; of a clu Collection its members, but for `loss`, which every run measures."""
    if isinstance(metrics, Mapping) or metrics is None:
        return dict(metrics or {})
    members = inspect.get_annotations(metrics, eval_str=True) if isinstance(metrics, type) else {}
    found = {name: one for name, one in members.items() if hasattr(one, "from_model_output")}
    if not found:
        raise ConfigError(
            f"metrics are a {type(metrics).__name__}, expected a mapping of names. HINT: Metrics({{'f1': "
            "cx.F1(10)}), or a clu Collection class."
        )
    return {name: one for name, one in found.items() if name != "loss"}


def state_of(name: str, metric: Any, output: PyTree, target: PyTree) -> Any:
    """The state that a metric class computes from a batch; arguments are matched by name.

    Raises: ConfigError for an argument that nothing is known of.
    """
    kind, options = _kind(metric)
    takes = inspect.signature(kind.from_model_output).parameters
    offered = dict(output) if isinstance(output, Mapping) else {}
    offered |= dict.fromkeys(_OUTPUT, output) | dict.fromkeys(_TARGET, target)
    is_open = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    given = {key: value for key, value in offered.items() if is_open or key in takes} | options
    if "from_logits" in takes and "from_logits" not in given:
        raise ConfigError(
            f"metric {name!r} ({kind.__name__}) takes logits or probabilities, as from_logits says. HINT: "
            f"functools.partial({kind.__name__}, from_logits=True)."
        )
    wants = [key for key, one in takes.items() if one.default is one.empty and one.kind in _NAMED]
    missing = [key for key in wants if key not in given]
    if missing:
        raise ConfigError(
            f"metric {name!r} ({kind.__name__}) wants {', '.join(missing)}, and is offered the output "
            f"({', '.join(_OUTPUT[:2])}) and the target ({', '.join(_TARGET[:2])}). HINT: return a dict with "
            "these names from the model, or write a cx.Statistic."
        )
    return kind.from_model_output(**given)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _of_class(name: str, metric: Any) -> Statistic:
    """Each sample is measured as a batch of its own, so that padding, whatever it holds, counts nothing."""
    kind = _kind(metric)[0]

    def update(state: PyTree, output: PyTree, target: PyTree, weight: jax.Array) -> PyTree:
        def alone(o: PyTree, t: PyTree) -> Any:
            return state_of(name, metric, *jax.tree.map(lambda a: a[None], (o, t)))

        each = jax.vmap(alone)(output, target)
        shapes = [tuple(jax.tree.map(lambda a: a.shape, jax.tree.leaves(s))) for s in (state, each)]
        forms: Any = jax.tree.structure(each), jax.tree.structure(state)
        same = forms[0] == forms[1]
        if not same or shapes[0] != tuple(shape[1:] for shape in shapes[1]):
            raise ConfigError(
                f"metric {name!r}: the state of {kind.__name__} depends on the shapes of output and target. "
                "HINT: write it as a cx.Statistic."
            )
        return jax.tree.map(lambda s, e: s + _summed(e, weight), state, each)

    return Statistic(_zeros(name, metric), update, lambda a, b: a.merge(b), lambda state: state.compute())


def _zeros(name: str, metric: Any) -> Callable[[], PyTree]:
    """The state of nothing. `empty()` may be scalars where a batch's state is arrays, so one is made up."""

    def init() -> PyTree:
        for shapes in _LIKELY:
            batch = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
            try:
                form = jax.eval_shape(partial(state_of, name, metric), *batch)
            except ConfigError:
                raise
            except Exception:  # not what it takes
                continue
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), form)
        return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), _kind(metric)[0].empty())

    return init


_LIKELY = (
    (((1, 3), jnp.float32), ((1,), jnp.int32)),
    (((1,), jnp.float32), ((1,), jnp.float32)),
    (((1, 1), jnp.float32), ((1, 1), jnp.float32)),
    (((1, 4, 3), jnp.float32), ((1, 4), jnp.int32)),
)


def _summed(each: jax.Array, weight: jax.Array) -> jax.Array:
    """sum_i weight_i * each_i; of rows that weigh nothing whatever they hold."""
    by_row = weight.reshape(-1, *[1] * (each.ndim - 1))
    return jnp.where(by_row > 0, by_row * each.astype(jnp.float32), 0.0).sum(0)
