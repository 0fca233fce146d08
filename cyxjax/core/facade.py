"""The phases of a step as separate programs, for hand-written training loops.

These are the functions that `core/step.py` fuses, one dispatch each: forward, backward, update. Forward and
backward run on one process's devices; their results per replica become rows of global arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from cyxjax.core import phases
from cyxjax.core.draws import micro_batch_key, step_key
from cyxjax.core.losses import compiled_for_ours, of_batch
from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED
from cyxjax.core.model.batch_stats import OWN, StatsAxes, needs_full_batches
from cyxjax.core.model.model_fns import ModelFns, Sown
from cyxjax.core.model.outputs import check_samples_first
from cyxjax.core.replica import from_replica, model_map, psum, sync_map, to_replica
from cyxjax.core.step import TrainState, state_spec
from cyxjax.core.strategy import Reducer, Sync, norm, shortened
from cyxjax.core.trees import PyTree, are_finite, times
from cyxjax.errors import ConfigError, DataError

_NONE_ASKS = StatsAxes(refused="in a hand-written loop each replica computes its own statistics")


class Carried(NamedTuple):
    """What forward passes keep until the next update."""

    model_state: PyTree  # replicated before the first forward of a step, a row per replica after it
    count: Any  # float32 (replicas,): samples seen since the last update; None before the first forward


class Draw(NamedTuple):
    """What determines the random draws of a forward pass, as in the compiled step."""

    key: Any  # uint32 key data
    step: Any  # int32 (): optimizer steps done
    row: Any  # int32 (): rows of a replica in earlier forward passes since the last step
    first_replica: Any  # int32 (): the number of this process's first replica


def build_forward(
    fns: ModelFns, mesh: Mesh, num_replicas: int, is_first: bool, padded: bool = False
) -> Callable:
    """A function (params, Carried, Draw, inputs, weight) -> (output, pullback, Carried) in training mode.

    Rows are split over the local `mesh`; the pullback has a row per replica. is_first: nothing is carried
    yet. padded: some rows have zero weight; it then raises ConfigError for a norm that cannot exclude them.
    """
    stats = OWN if num_replicas == 1 else _NONE_ASKS
    spec = Carried(REPLICATED if is_first else PER_REPLICA, REPLICATED if is_first else PER_REPLICA)

    def local(params: PyTree, carried: Carried, draw: Draw, inputs: PyTree, weight: jax.Array) -> PyTree:
        carried = to_replica(carried, spec)
        rows, replica = weight.shape[0], draw.first_replica + lax.axis_index(AXIS)
        key = step_key(draw.key, draw.step)
        key = micro_batch_key(key, draw.row, replica, rows=1, num_replicas=num_replicas)
        if padded and (what := needs_full_batches(fns, params, carried.model_state, inputs, key)):
            raise ConfigError(
                f"{what}, and the samples of this batch cannot be divided over {mesh.size} devices: padding "
                f"would count. HINT: put the batch first, or use a multiple of {mesh.size} samples."
            )
        output, pullback, model_state = phases.forward(
            fns, params, carried.model_state, inputs, weight, key, stats
        )
        if isinstance(output, Sown):
            raise DataError(
                "the model sows losses of its own, which a hand-written loop would ignore. HINT: return them "
                "with the output and add them to the loss, or train with DistributedTrainer."
            )
        _check_rows(output, rows)
        seen = weight.sum() if carried.count is None else carried.count + weight.sum()
        pullback, carried = from_replica((pullback, Carried(model_state, seen)), PER_REPLICA)
        return output, pullback, carried

    in_specs = (REPLICATED, spec, REPLICATED, PER_REPLICA, PER_REPLICA)
    return jax.jit(model_map(local, mesh, in_specs, PER_REPLICA))


def build_infer(fns: ModelFns, mesh: Mesh) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """A function (params, model_state, inputs) -> output in evaluation mode, on the local `mesh`."""

    def local(params: PyTree, model_state: PyTree, inputs: PyTree) -> PyTree:
        output = fns.apply(params, model_state, inputs, jax.random.key(0), False)[0]
        _check_rows(output, jax.tree.leaves(inputs)[0].shape[0])
        return output

    return jax.jit(model_map(local, mesh, (REPLICATED, REPLICATED, PER_REPLICA), PER_REPLICA))


def build_backward(mesh: Mesh, has_rows: bool = True) -> Callable:
    """A function (pullback, output_grad, factor, grads or None) -> grads, a row per replica.

    has_rows: False where the process has no sample: its gradients are zeros.

    Pulls back `factor * output_grad` and adds the given grads. The gradient of a process's loss is the sum
    of its replicas' parts, and reducers take a mean over replicas; so for the mean over processes
    `factor` is replicas / processes, times a factor of the caller.
    """

    def local(pullback: Any, output_grad: PyTree, factor: jax.Array, grads: PyTree) -> PyTree:
        seed = jax.tree.map(lambda d: _cotangent(d, factor), output_grad)
        new = phases.backward(to_replica(pullback, PER_REPLICA), seed)
        if not has_rows:  # the model's derivative at the rows of zeros that it got may be NaN
            new = jax.tree.map(jnp.zeros_like, new)
        if grads is not None:
            new = jax.tree.map(jnp.add, to_replica(grads, PER_REPLICA), new)
        return from_replica(new, PER_REPLICA)

    run = model_map(local, mesh, (PER_REPLICA, PER_REPLICA, REPLICATED, PER_REPLICA), PER_REPLICA)
    return jax.jit(run, donate_argnums=3)


def build_update(
    sync: Sync, mesh: Mesh, grads_spec: Any, options: dict[str, Any] | None = None, *, keeps: bool = False
) -> Callable:
    """A function (TrainState, grads, Carried) -> the next TrainState, all processes together.

    grads_spec: PER_REPLICA for local gradients, REPLICATED for a mean that is already reduced.
    options: for the compiler. The state is donated, except parameters and model state if `keeps` is set.
    """
    spec = state_spec(sync)

    def local(state: TrainState, grads: PyTree, carried: Carried) -> TrainState:
        state, grads = to_replica(state, spec), to_replica(grads, grads_spec)
        carried = to_replica(carried, PER_REPLICA)
        params, strategy = sync.update(grads, state.sync, state.params)[:2]
        seen, old = psum(carried.count), state.model_state
        mean = phases.mean_model_state(carried.model_state, old, carried.count)
        model_state = jax.tree.map(lambda new, old: jnp.where(seen > 0, new, old), mean, old)
        return from_replica(TrainState(state.step + 1, params, model_state, strategy, state.key), spec)

    run = sync_map(local, mesh, (spec, grads_spec, PER_REPLICA), spec)
    if not keeps:
        return jax.jit(run, donate_argnums=0, compiler_options=options)

    def with_kept(rest: TrainState, params: PyTree, model_state: PyTree, *given: PyTree) -> TrainState:
        return run(rest._replace(params=params, model_state=model_state), *given)

    kept = jax.jit(with_kept, donate_argnums=0, compiler_options=options)
    empty = {"params": None, "model_state": None}
    return lambda state, *given: kept(state._replace(**empty), state.params, state.model_state, *given)


def build_reduce(
    reducer: Reducer, reducer_spec: PyTree, mesh: Mesh, options: dict[str, Any] | None = None
) -> Callable:
    """A function (grads, reducer state, params) -> (mean grads, reducer state), all processes together.

    The reducer's state does not change if the mean is not finite: what a NaN left in it would never go away.
    """

    def local(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        grads, state = to_replica(grads, PER_REPLICA), to_replica(state, reducer_spec)
        mean_grads, new = reducer.update(grads, state, params)
        holds = are_finite(mean_grads)
        state = jax.tree.map(lambda n, old: jnp.where(holds, n, old), new, state)
        return mean_grads, from_replica(state, reducer_spec)

    in_specs = (PER_REPLICA, reducer_spec, REPLICATED)
    run = sync_map(local, mesh, in_specs, (REPLICATED, reducer_spec))
    return jax.jit(run, donate_argnums=1, compiler_options=options)


def init_on(mesh: Mesh, transformation: optax.GradientTransformation, spec: PyTree, params: PyTree) -> PyTree:
    """The first state of a reducer or an optimizer, placed by `spec`."""
    init = lambda p: from_replica(transformation.init(p), spec)  # noqa: E731
    return jax.jit(sync_map(init, mesh, REPLICATED, spec))(params)


@jax.jit
def scale_and_check(grads: PyTree, factor: jax.Array) -> tuple[PyTree, jax.Array]:
    """(grads * factor, whether all of them are finite)."""
    scaled = times(factor, grads)
    return scaled, are_finite(scaled)


@jax.jit
def clip_by_norm(grads: PyTree, max_norm: jax.Array) -> tuple[PyTree, jax.Array]:
    """(grads, scaled so that their norm is at most `max_norm`; the norm before)."""
    before = norm(grads)
    return shortened(grads, before, max_norm), before


@compiled_for_ours
def loss_and_output_grad(criterion: Any, output: PyTree, target: PyTree) -> tuple[jax.Array, PyTree]:
    """(loss of the samples, its gradient with respect to `output`); zeros for integer outputs."""
    target = jax.tree.map(jnp.asarray, target)
    of_output = jax.value_and_grad(lambda made: of_batch(criterion, made, target), allow_int=True)
    value, grads = of_output(output)
    no_grad = jax.dtypes.float0
    return value, jax.tree.map(lambda g, a: jnp.zeros_like(a) if g.dtype == no_grad else g, grads, output)


def _cotangent(grad: jax.Array, factor: jax.Array) -> Any:
    if not jnp.issubdtype(grad.dtype, jnp.inexact):
        return np.zeros(grad.shape, jax.dtypes.float0)  # jax.vjp expects this for integers
    return times(factor, grad)


def _check_rows(output: PyTree, rows: int) -> None:
    check_samples_first(output, rows)
    if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(output)):
        raise DataError(
            "the model returns one number for all samples, which a hand-written loop cannot divide among "
            "devices. HINT: return it for each sample, jnp.full(len(x), number), or train with "
            "DistributedTrainer."
        )
