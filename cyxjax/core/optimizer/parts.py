"""Parts that callbacks put around an optimizer: numbers in its state, read and moved between epochs.

Being state, they are saved and restored with it, and changing them compiles nothing again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cyxjax.core.step import TrainState
from cyxjax.core.trees import bits_as_keys, keys_as_bits, named_leaves
from cyxjax.errors import ConfigError

PyTree = Any


class LearningRateFactor(NamedTuple):
    factor: Any  # float32 (): what updates are multiplied by


class ParameterAverage(NamedTuple):
    count: Any  # int32 (): steps seen
    average: PyTree  # like params
    inner: PyTree  # the wrapped optimizer's state


def with_learning_rate_factor(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` with its updates times a factor in its state, 1 at first (see `scale_learning_rate`)."""

    def init(params: PyTree) -> LearningRateFactor:
        del params
        return LearningRateFactor(jnp.float32(1.0))

    def update(updates: PyTree, state: LearningRateFactor, params: PyTree = None) -> Any:
        del params
        return jax.tree.map(lambda u: u * state.factor.astype(u.dtype), updates), state

    factor = optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # optax: any state
    return optax.chain(optimizer, factor)


def with_parameter_average(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """`optimizer` that also keeps average' = d * average + (1 - d) * params'.

    d = min(decay, (1 + t) / (10 + t)) for step t, counted from 0; the average starts as the first parameters
    and has their dtypes.
    """

    def init(params: PyTree) -> ParameterAverage:
        return ParameterAverage(jnp.int32(0), jax.tree.map(jnp.copy, params), optimizer.init(params))

    def update(grads: PyTree, state: ParameterAverage, params: PyTree = None) -> Any:
        updates, inner = optimizer.update(grads, state.inner, params)
        t = state.count.astype(jnp.float32)
        d = jnp.minimum(jnp.float32(decay), (1 + t) / (10 + t))
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: a + (p - a) * (1 - d).astype(a.dtype), state.average, new)
        return updates, ParameterAverage(state.count + 1, average, inner)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # optax: any state


def scale_learning_rate(state: TrainState, by: float) -> TrainState:
    """`state` whose `LearningRateFactor`s are multiplied by `by`; other leaves are the same arrays."""

    # Inside jit, where the arrays of a group of processes may be computed with; sharding stays.
    def scaled(part: Any) -> Any:
        return _times(part, jnp.float32(by)) if isinstance(part, LearningRateFactor) else part

    return state._replace(sync=_map_parts(scaled, state.sync, LearningRateFactor))


_times = jax.jit(lambda part, by: jax.tree.map(lambda a: a * by, part))


def averaged_params(state: TrainState) -> PyTree:
    """The average that `with_parameter_average` keeps in `state`.

    Raises: ConfigError where a strategy cuts it into the parts of replicas.
    """
    found: list[ParameterAverage] = []
    _map_parts(lambda part: found.append(part), state.sync, ParameterAverage)
    # Each optimizer of a task's terms has one of its own parameters; what is not trained is its own.
    parts = [named_leaves(p.average) for p in found if isinstance(p, ParameterAverage)]
    average = {name: leaf for part in parts for name, leaf in part}
    params = named_leaves(state.params)
    if not parts or any(average.get(name, leaf).shape != leaf.shape for name, leaf in params):
        raise ConfigError(
            "EMA needs the whole average on every replica where the parameters are whole, and this strategy "
            "has parts of it. HINT: use comm='mean' (or bf16, int8, power_sgd; fsdp, all in parts) with EMA."
        )
    return jax.tree.unflatten(
        jax.tree.structure(state.params), [_on_device(average.get(name, leaf)) for name, leaf in params]
    )


def _on_device(leaf: jax.Array) -> jax.Array:
    """`leaf` where a model can compute with it, from wherever the optimizer's state is kept."""
    in_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
    return jax.device_put(leaf, jax.memory.Space.Device) if in_host else leaf


def _map_parts(f: Callable[[Any], Any], tree: PyTree, kind: type) -> PyTree:
    return jax.tree.map(f, tree, is_leaf=lambda part: isinstance(part, kind))


def with_saved_keys(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` whose state holds typed random keys as numbers: checkpoints take those alone."""

    def init(params: PyTree) -> PyTree:
        return keys_as_bits(optimizer.init(params))

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple:
        updates, state = optimizer.update(grads, bits_as_keys(state), params, **extra)
        return updates, keys_as_bits(state)

    return type(optimizer)._make((init, update))
