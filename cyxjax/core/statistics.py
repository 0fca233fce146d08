"""Metrics that are not means: sums over samples, and a function of these sums.

F1, AUC, R2 and a confusion matrix are not means of the samples' values, but functions of sums over samples. A
step reduces these sums with all others, so they are those of the whole batch for any number of replicas.
Metrics of clu and metrax, and objects with (init, update, merge, compute), become such statistics.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.model.model_fns import Sown
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError


class Statistic(NamedTuple):
    """A metric of sums, for `cx.Metrics({"f1": cx.F1(10)})` or a `cx.Task`.

    Its state is a tree of numbers that add up: the state of two batches is the sum of their states, and
    `merge` must agree. (A maximum or a median has no such state.)
    """

    init: Callable[[], PyTree]  # the state of no sample: zeros
    update: Callable[[PyTree, PyTree, PyTree, jax.Array], PyTree]
    """(state, output, target, weight (B,)) -> state; weight is 0 for padding, which counts nothing."""
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
    """A statistic as rows of a step's sums, float32 (num_rows, 2): its numbers, two a row."""

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
        """Of the numbers it gives, also of no sample; an array has none that could be watched."""
        nothing = self.values(np.zeros((self.num_rows, 2)))
        return tuple(name for name, value in nothing.items() if not isinstance(value, np.ndarray))

    def rows(self, output: PyTree, target: PyTree, weight: jax.Array) -> jax.Array:
        """What a batch adds. Raises: ConfigError for a state of another form than `init` gives."""
        output = output.output if isinstance(output, Sown) else output
        state = self.statistic.update(self.statistic.init(), output, target, weight)
        if _shapes(state) != _shapes(self._form):
            raise ConfigError(
                f"metric {self.name!r}: its update gives {_shapes(state)[1]} and its init "
                f"{_shapes(self._form)[1]}. HINT: init gives zeros of the shapes that update gives."
            )
        flat = jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(state)])
        return jnp.pad(flat, (0, 2 * self.num_rows - flat.size)).reshape(-1, 2)

    def check_merge(self) -> None:
        """Returns where `merge` adds states up, as a step does. Raises: ConfigError."""
        rng = np.random.default_rng(0)
        drawn = lambda leaf: jnp.asarray(rng.integers(1, 9, leaf.shape), leaf.dtype)  # noqa: E731
        one, two = (jax.tree.map(drawn, self._form) for _ in range(2))
        merged, added = self.statistic.merge(one, two), jax.tree.map(jnp.add, one, two)
        pairs = zip(jax.tree.leaves(merged), jax.tree.leaves(added), strict=True)
        if not all(np.allclose(a, b) for a, b in pairs):
            raise ConfigError(
                f"metric {self.name!r}: its merge is not the sum of two states, as a step adds them up over "
                "replicas and batches. HINT: a state of weighted sums over samples; compute what has none (a "
                "maximum, a median) from trainer.predict.",
                key="metrics",
            )

    def values(self, rows: np.ndarray) -> dict[str, Any]:
        """name -> number or array, of summed rows; NaN where nothing was counted."""
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


_PARTS = ("init", "update", "merge", "compute")
_FOREIGN = ("from_model_output", "merge", "compute", "empty")
_OUTPUT = ("logits", "predictions", "preds", "output", "outputs", "y_pred")
_TARGET = ("labels", "targets", "target", "y_true", "label")


def is_statistic(metric: Any) -> bool:
    """Whether `as_statistic` would make one of `metric`."""
    return _is_foreign(metric) or _has(metric, _PARTS)


def as_statistic(name: str, metric: Any) -> Statistic | None:
    """`metric` as a statistic; None for a function, which gives a value a sample."""
    if _is_foreign(metric):
        return _of_class(name, metric)
    if _has(metric, _PARTS):
        parts = (getattr(metric, part) for part in _PARTS)
        return Statistic._make([*parts, getattr(metric, "better", None)])
    return None


def _has(metric: Any, parts: tuple[str, ...]) -> bool:
    return all(callable(getattr(metric, part, None)) for part in parts)


def _is_foreign(metric: Any) -> bool:
    """Whether it is a class as clu and metrax have them, or a partial of one: its further keywords."""
    return _has(_kind(metric)[0], _FOREIGN)


def _kind(metric: Any) -> tuple[Any, dict[str, Any]]:
    """(class, further keywords of its from_model_output)."""
    if isinstance(metric, partial):
        return metric.func, metric.keywords
    return (metric if isinstance(metric, type) else type(metric)), {}


def unpacked(metrics: Any) -> dict[str, Any]:
    """A mapping as a dict; of a clu Collection its members, but for `loss`, which every run measures."""
    if not isinstance(metrics, type):
        return dict(metrics or {})
    members = inspect.get_annotations(metrics, eval_str=True)
    found = {name: one for name, one in members.items() if _is_foreign(one) and name != "loss"}
    if not found and "loss" not in members:
        raise ConfigError(
            f"metrics={metrics.__name__}: a class without metrics as members. HINT: {{'name': "
            f"{metrics.__name__}}} for a metric; a clu Collection names its metrics.",
            key="metrics",
        )
    return found


def _of_class(name: str, metric: Any) -> Statistic:
    """Each sample is measured as a batch of its own, so that padding, whatever it holds, counts nothing."""

    def update(state: PyTree, output: PyTree, target: PyTree, weight: jax.Array) -> PyTree:
        def alone(o: PyTree, t: PyTree) -> Any:
            return _state_of(name, metric, *jax.tree.map(lambda a: a[None], (o, t)))

        each = jax.vmap(alone)(output, target)
        for mine, one in zip(jax.tree.leaves(state), jax.tree.leaves(each), strict=True):
            if mine.ndim and mine.shape != one.shape[1:]:
                raise ConfigError(
                    f"metric {name!r}: its state has the shape {one.shape[1:]} for the model's output and "
                    f"{mine.shape} for a guess of 3 classes. HINT: use a cx.Statistic."
                )
        return jax.tree.map(lambda s, e: s + _summed(e, weight), state, each)

    def init() -> PyTree:
        # `empty()` may be scalars where a batch's state is arrays, so that a batch is made up.
        for shapes in _LIKELY:
            batch = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
            try:
                form = jax.eval_shape(partial(_state_of, name, metric), *batch)
            except Exception:  # not what it takes
                continue
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), form)
        return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), _kind(metric)[0].empty())

    return Statistic(init, update, lambda a, b: a.merge(b), lambda state: state.compute())


def _state_of(name: str, metric: Any, output: PyTree, target: PyTree) -> Any:
    """The state that a metric class computes from a batch; arguments are matched by name.

    Raises: ConfigError for one that takes logits or probabilities, and is not told which.
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
    return kind.from_model_output(**given)


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
