"""Transformations around an optimizer, and the check that it is elementwise.

Values that callbacks read and change between epochs (a factor of the learning rate, an average of the
parameters) are part of the optimizer's state: they are saved with it, and a change does not recompile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from cyxjax.core.mesh import local_value
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import step_value
from cyxjax.core.trees import PyTree, bits_as_keys, keys_as_bits, leaf_names, named_leaves, on_device, times
from cyxjax.errors import ConfigError, CyxjaxError


class LearningRateFactor(NamedTuple):
    factor: Any  # float32 (): multiplies the updates; or a tree of them, one for each leaf


class ParameterAverage(NamedTuple):
    count: Any  # int32 (): steps seen
    average: PyTree  # like params, in float32 or wider
    inner: PyTree  # the wrapped optimizer's state


def with_learning_rate_factor(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` with updates multiplied by a factor in its state, 1 until `set_learning_rate_factor`."""

    def update(updates: PyTree, state: LearningRateFactor, params: PyTree = None) -> Any:
        factors = jax.tree.broadcast(state.factor, updates)
        return jax.tree.map(times, factors, updates), state

    first = lambda params: LearningRateFactor(jnp.float32(1.0))  # noqa: E731
    factor = optax.GradientTransformation(first, update)  # type: ignore[arg-type]  # optax: any state
    return optax.chain(optimizer, factor)


def with_parameter_average(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """`optimizer` that also keeps average' = d * average + (1 - d) * params'.

    d = min(decay, (1 + t) / (10 + t)) for step t, counted from 0; the average starts as the first parameters.
    It is kept in float32 or wider: in bfloat16 a change below 1/256 of a value would be lost.
    """

    def first(p: jax.Array) -> jax.Array:
        is_inexact = jnp.issubdtype(p.dtype, jnp.inexact)
        return jnp.array(p, np.promote_types(p.dtype, np.float32) if is_inexact else p.dtype)

    def init(params: PyTree) -> ParameterAverage:
        return ParameterAverage(jnp.int32(0), jax.tree.map(first, params), optimizer.init(params))

    def update(grads: PyTree, state: ParameterAverage, params: PyTree = None) -> Any:
        updates, inner = optimizer.update(grads, state.inner, params)
        t = state.count.astype(jnp.float32)
        d = jnp.minimum(jnp.float32(decay), (1 + t) / (10 + t))
        new = optax.apply_updates(params, updates)
        moved = lambda a, p: a + (p.astype(a.dtype) - a) * (1 - d).astype(a.dtype)  # noqa: E731
        average = jax.tree.map(moved, state.average, new)
        return updates, ParameterAverage(state.count + 1, average, inner)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # optax: any state


def learning_rate_factor(state: TrainState) -> float:
    """The factor in the `LearningRateFactor` of `state`, as the shortest number equal to it in float32."""
    found = filter(_is_factor, jax.tree.leaves(state.sync, is_leaf=_is_factor))
    return float(str(local_value(next(found).factor).flat[0]))


def set_learning_rate_factor(state: TrainState, factor: float) -> TrainState:
    """`state` whose `LearningRateFactor`s hold `factor`; other leaves are the same arrays."""

    def changed(part: Any) -> Any:
        # Inside jit, which can compute with arrays of several processes; the sharding is kept.
        return _with_value(part, jnp.float32(factor)) if _is_factor(part) else part

    return state._replace(sync=jax.tree.map(changed, state.sync, is_leaf=_is_factor))


def _is_factor(part: Any) -> bool:
    return isinstance(part, LearningRateFactor)


_with_value = jax.jit(lambda part, value: jax.tree.map(lambda a: 0 * a + value, part))


def averaged_params(state: TrainState) -> PyTree:
    """The average that `with_parameter_average` keeps in `state`, in the parameters' dtypes.

    Raises: ConfigError if a strategy splits it over replicas.
    """
    is_average = lambda part: isinstance(part, ParameterAverage)  # noqa: E731
    found = filter(is_average, jax.tree.leaves(state.sync, is_leaf=is_average))
    # Each optimizer of a task's terms averages its own parameters; frozen ones are used as they are.
    parts = [named_leaves(one.average) for one in found]
    average = {name: leaf for part in parts for name, leaf in part}
    params = named_leaves(state.params)
    if not parts or any(average.get(name, leaf).shape != leaf.shape for name, leaf in params):
        raise ConfigError(
            "EMA needs the whole average on every replica where the parameters are whole, but this strategy "
            "splits it. HINT: with EMA use comm='mean' (or bf16, int8, power_sgd; fsdp, which splits both)."
        )
    return jax.tree.unflatten(
        jax.tree.structure(state.params),
        [on_device(average.get(name, leaf)).astype(leaf.dtype) for name, leaf in params],
    )


def adapted(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` whose state holds typed random keys as integers, because checkpoints hold only numbers.

    Its errors are raised as ConfigError.
    """

    @_explained()
    def init(params: PyTree) -> PyTree:
        return keys_as_bits(optimizer.init(params))

    @_explained()
    def update(grads: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple:
        updates, state = optimizer.update(grads, bits_as_keys(state), params, **extra)
        return updates, keys_as_bits(state)

    return type(optimizer)._make((init, update))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as err:
        if isinstance(err, CyxjaxError):
            raise
        raise ConfigError(
            f"the optimizer cannot make a step: {type(err).__name__}: {' '.join(str(err).split())} HINT: the "
            "step passes gradients, state, parameters and, to a trainer's one optimizer, the loss, but "
            "has no line search: use optax.lbfgs(lr, linesearch=None); labels and masks must match the "
            "parameters' tree.",
            key="optimizer",
        ) from err


_MAX_DIM, _STEPS = 8, 8


def refuse_unless_elementwise(
    optimizer: optax.GradientTransformation, params: PyTree, cut: Callable, comm: str
) -> None:
    """Returns if the update of each number depends only on the gradients, value and state of this number.

    Runs a few updates of small leaves (dimensions of at most 8), each filled with one value. In whole leaves
    every second gradient is NaN, which must not reach the others. Parts of these leaves must get the same
    updates, and so must whole leaves without NaN, because an optimizer may turn NaN into 0.
    params: shapes of the real tree. cut: (shape, parts) -> the shape of a part of a leaf of this shape.
    Raises: ConfigError naming a leaf, if the optimizer is not elementwise.
    """
    grown = jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(3 * n for n in p.shape), p.dtype), params)
    states = [jax.tree.leaves(jax.eval_shape(optimizer.init, tree)) for tree in (params, grown)]
    same_state = [tuple(3 * n for n in one.shape) for one in states[0]] == [one.shape for one in states[1]]
    small = jax.tree.map(lambda p: jax.ShapeDtypeStruct([min(n, _MAX_DIM) for n in p.shape], p.dtype), params)
    parts, wrong = jax.tree.map(lambda p: jax.ShapeDtypeStruct(cut(p.shape, 2), p.dtype), small), []
    try:
        with jax.debug_nans(False):
            of_whole, of_part = (jax.jit(partial(_updates, optimizer, tree)) for tree in (small, parts))
            whole, states_of_whole = jax.device_get(of_whole(2))
            clean, _ = jax.device_get(of_whole(1))
            part, states_of_part = jax.device_get(of_part(1))
        for name, other, *both in zip(leaf_names(params), part, whole, clean, strict=True):
            if not all(np.allclose(a[:, ::2], other[:, :1], rtol=1e-5, atol=0, equal_nan=True) for a in both):
                wrong.append(name)
        counters = [pair for pair in zip(states_of_whole, states_of_part, strict=False) if pair[1].ndim < 2]
        same_state &= all(np.array_equal(one, other, equal_nan=True) for one, other in counters)
    except TypeError:  # from jax.lax.scan: the type of the state changes from step to step
        same_state = False
    if wrong or not same_state:
        raise ConfigError(
            f"comm={comm!r} gives the optimizer a part of each leaf, but this optimizer is not elementwise: "
            f"{f'its update of {wrong[0]!r}' if wrong else 'its state'} depends on whole leaves. HINT: clip "
            "with max_grad_norm in the configuration, or use comm='mean', which keeps leaves whole.",
            key="comm",
        )


def _updates(optimizer: optax.GradientTransformation, shapes: PyTree, every: jax.Array) -> PyTree:
    """(updates (steps, size) by leaf, leaves of the state (steps, ...)), for one gradient value per leaf.

    Only every `every`-th element of a leaf has this gradient; the gradients of the others are NaN.
    """
    leaves, structure = jax.tree.flatten(shapes)
    values = [0.3 + 0.1 * (i % 7) for i in range(len(leaves))]  # a different value for each leaf
    params = [jnp.full(p.shape, value, p.dtype) for p, value in zip(leaves, values, strict=True)]
    params = jax.tree.unflatten(structure, params)

    def poisoned(p: jax.Array) -> jax.Array:
        return jnp.where((jnp.arange(p.size) % every).reshape(p.shape) > 0, jnp.nan, p).astype(p.dtype)

    def step(state: PyTree, _: None) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(jax.tree.map(poisoned, params), state, params)
        return state, (
            [u.reshape(-1) for u in jax.tree.leaves(updates)],
            jax.tree.leaves(keys_as_bits(state)),
        )

    with step_value(jnp.ones(2)):
        return lax.scan(step, optimizer.init(params), length=_STEPS)[1]
