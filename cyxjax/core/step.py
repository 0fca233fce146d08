"""The compiled step: the phases fused into one program, two maps inside one jit, state donated."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from cyxjax.core import phases
from cyxjax.core.draws import micro_batch_key, step_key
from cyxjax.core.losses import PerExample
from cyxjax.core.memory import memory_options, with_whole
from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED, num_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.batch_stats import OWN, StatsAxes
from cyxjax.core.model.model_fns import ModelFns, Sown
from cyxjax.core.objective.split_check import SplitCheck, split_check
from cyxjax.core.replica import from_replica, model_map, psum, sync_map, to_replica
from cyxjax.core.rows import whole_batch
from cyxjax.core.strategy import Stepped, Sync, loss_factors, norm_row, step_value, written_after
from cyxjax.core.trees import PyTree, times, widened


class TrainState(NamedTuple):
    """Everything that determines the next step."""

    step: jax.Array  # int32 (): optimizer steps done
    params: PyTree
    model_state: PyTree
    sync: PyTree  # the strategy's and the optimizer's state
    key: jax.Array  # uint32 key data; folded with the step and the sample's place, never split


class Batch(NamedTuple):
    """One optimizer step's global batch; rows split along axis `data`, a replica's micro-batches in turn."""

    inputs: PyTree  # leaves (R * k * B, ...): replicas, micro-batches, samples
    targets: PyTree
    weight: jax.Array  # float32 (R * k * B,): 1 for a sample, 0 for padding
    total: jax.Array  # float32 (): sum of all weights; the host knows it, so it needs no collective
    signal: jax.Array  # float32 (R, 2): requests of this rank to stop and to save; summed with the metrics


Rows = tuple[PyTree, PyTree, jax.Array]  # inputs, targets and weight of some samples
NO_CHECK = SplitCheck()
LEFT_OUT = (0.0, -1.0)  # in place of the norm of the mean gradients: the strategy skipped the step
BATCH_SPEC = Batch._make([PER_REPLICA, PER_REPLICA, PER_REPLICA, REPLICATED, PER_REPLICA])


def state_spec(sync: Sync) -> TrainState:
    return TrainState._make([REPLICATED, sync.params_spec, REPLICATED, sync.state_spec, REPLICATED])


def first_state(sync: Sync, params: PyTree, model_state: PyTree, key: jax.Array) -> TrainState:
    """The state before the first step, from whole parameters and the run's key; inside `sync_map`."""
    kept, state = sync.hold(params), sync.init(params)
    made = TrainState(jnp.zeros((), jnp.int32), kept, model_state, state, jax.random.key_data(key))
    return from_replica(made, state_spec(sync))


def build_init(sync: Sync, mesh: Mesh) -> Callable[[PyTree, PyTree, int], TrainState]:
    """A function (params, model_state, seed) -> the state before the first step, on the mesh.

    Compiled once for any number of runs; `params` and `model_state` are equal on all ranks.
    """

    def init(params: PyTree, model_state: PyTree, seed: jax.Array) -> TrainState:
        return first_state(sync, params, model_state, jax.random.key(seed))

    mapped = sync_map(init, mesh, (REPLICATED, REPLICATED, REPLICATED), state_spec(sync))

    @jax.jit
    def placed(params: PyTree, model_state: PyTree, seed: jax.Array) -> TrainState:
        return sync.stow(mapped(params, model_state, seed))

    return lambda params, model_state, seed: placed(params, model_state, np.uint32(seed))


class Summed(NamedTuple):
    """Sums over samples on one replica."""

    pulled: list[phases.Pulled]  # gradients, one tree for each mean of the loss
    metrics: jax.Array  # float32 (number of metrics, 2)
    checks: jax.Array | None  # float32 (number of checks, 2); None: nothing is compared


def sum_gradients(
    fns: ModelFns,
    loss: PerExample,
    metrics: Metrics,
    params: PyTree,
    model_state: PyTree,
    rows: Rows,
    factors: tuple[jax.Array, jax.Array | None],
    key: jax.Array,
    stats: StatsAxes = OWN,
    check: SplitCheck = NO_CHECK,
) -> tuple[PyTree, Summed]:
    """(new model state, LOCAL gradients of `sum(weight * losses)` and metric sums), one micro-batch.

    Runs forward, loss and backward on one replica. rows: of the micro-batch. factors: see `loss_factors`.
    check: what is compared, where the rows are a part of the batch.
    """
    inputs, targets, weight = rows
    output, pullback, model_state = phases.forward(fns, params, model_state, inputs, weight, key, stats)
    on_loss, on_grads = factors
    losses, pulled = phases.pull_back(loss, output, pullback, targets, weight, on_loss)
    if on_grads is not None:
        pulled = [one._replace(grads=times(on_grads, one.grads)) for one in pulled]
    output = output.output if isinstance(output, Sown) else output
    checks = check.rows(output, targets) if check.measures else None
    return model_state, Summed(pulled, metrics.sums(losses, output, targets, weight), checks)


def next_state(
    sync: Sync, state: TrainState, grads: PyTree, model_state: PyTree, sums: jax.Array
) -> tuple[TrainState, jax.Array]:
    """(the state after a step, its sums); inside `sync_map`, on one replica.

    grads: LOCAL. model_state: the mean over replicas. sums: over all replicas, with signals in the last row;
    the norm of the mean gradients (`norm_row`) is inserted before it. A step that `sync` skipped changes
    nothing: it has `LEFT_OUT` in place of the norm, and its sums are 0 unless they are finite.
    """
    with step_value(sums[0]):
        stepped = Stepped(*sync.update(grads, state.sync, state.params))
    row = norm_row(stepped, state.step)
    params = written_after(row, stepped)
    kept, measured = stepped.counts, sums[:-1]
    if kept is not True:
        model_state = jax.tree.map(lambda new, old: jnp.where(kept, new, old), model_state, state.model_state)
        measured = jnp.where(kept | jnp.isfinite(measured).all(), measured, 0.0)
        row = jnp.where(kept, row, jnp.array(LEFT_OUT, jnp.float32))
    state = TrainState(state.step + 1, params, model_state, stepped.state, state.key)
    return state, jnp.concatenate([measured, row[None], sums[-1:]])


def with_checks(sums: jax.Array, checks: jax.Array | None) -> jax.Array:
    """`sums` of a step, followed by `checks`, if any."""
    return sums if checks is None else jnp.concatenate([sums, checks])


def build_train_step(
    fns: ModelFns,
    loss: PerExample,
    sync: Sync,
    mesh: Mesh,
    *,
    accumulation: int = 1,
    metrics: Metrics | None = None,
    sync_batchnorm: bool = False,
    several: bool = False,
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """A function (state, batch) -> (next state, sums float32 (number of metrics + 2 + number of checks, 2)).

    One optimizer step over `accumulation` micro-batches: gradients of the mean loss over all samples of the
    global batch, on all replicas, reduced once. `state` is donated: keep no reference to it. After the
    metrics, the sums contain the norm of the mean gradients (`norm_row`), the signals of all ranks (so that
    they agree on a stop without an extra collective), and what `split_check` compares where the batch is
    split. One replica without micro-batches has the whole batch: if a loss or metric of one number is used
    there, batches must have no padding. several: the function takes (state, batches, first, stop) instead,
    where `batches` is a Batch with an additional first dimension over steps; it runs the steps first to
    stop - 1 in one dispatch and returns the sums of each.
    """
    spec, measured, fns = state_spec(sync), metrics or Metrics(), with_whole(fns, sync)
    stats = StatsAxes(AXIS if sync_batchnorm else None, asked=AXIS)
    replicas = num_replicas(mesh)
    is_whole = replicas * accumulation == 1
    check = NO_CHECK if is_whole else split_check(loss, measured)

    def local(state: TrainState, batch: Batch) -> tuple[PyTree, ...]:
        state = to_replica(state, spec)
        key = step_key(state.key, state.step)
        # Reducers take a mean over replicas; dividing by total / R turns it into the mean over samples:
        # mean_r(R / total * sum_i w_i dl_i) = sum over all samples / total, also when shards are uneven.
        factors = loss_factors(sync, state.sync, replicas, replicas * len(batch.weight), batch.total)
        rows = batch.weight.shape[0] // accumulation

        def micro(model_state: PyTree, slot: jax.Array, part: Rows) -> tuple[PyTree, Summed]:
            draws = micro_batch_key(key, slot, lax.axis_index(AXIS), rows=rows, num_replicas=replicas)
            return sum_gradients(
                fns, loss, measured, state.params, model_state, part, factors, draws, stats, check
            )

        with whole_batch(is_whole):
            model_state, sums = _over_micro_batches(micro, state.model_state, batch[:3], accumulation)
        measures = jnp.concatenate([sums.metrics, batch.signal])
        grads = phases.means_of(sums.pulled, batch.total)
        out = (grads, model_state, batch.weight.sum(), measures, sums.checks)
        return from_replica(out, PER_REPLICA)

    def write(state: TrainState, rows: PyTree) -> tuple[TrainState, jax.Array]:
        state, rows = to_replica(state, spec), to_replica(rows, PER_REPLICA)
        grads, model_state, weight, sums, checks = rows
        mean_state = phases.mean_model_state(model_state, state.model_state, weight)
        state, sums = next_state(sync, state, grads, mean_state, measured.settled(psum(sums)))
        return from_replica(state, spec), with_checks(sums, None if checks is None else psum(checks))

    model = model_map(local, mesh, (spec, BATCH_SPEC), PER_REPLICA)
    reduce = sync_map(write, mesh, (spec, PER_REPLICA), (spec, REPLICATED))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        state = sync.fetch(state)
        state, sums = reduce(state, model(state, batch))
        return sync.stow(state), sums

    def steps(
        state: TrainState, batches: Batch, first: jax.Array, stop: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        # Without negative indices, which take three more operations for each array.
        row = partial(lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)

        def body(i: jax.Array, carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
            state, out = carry
            state, sums = step(state, jax.tree.map(lambda a: row(a, i), batches))
            return state, lax.dynamic_update_index_in_dim(out, sums, i, 0, allow_negative_indices=False)

        # The number of rounds is known only at run time: one program for any number, hence the same bits.
        num_rows = measured.num_training_rows + 1 + len(check.measures)  # 1: the signals
        out = jnp.zeros((len(batches.total), num_rows, 2), jnp.float32)
        return lax.fori_loop(first, stop, body, (state, out))

    options = memory_options(mesh) if sync.regather or fns.recomputes else {}
    return jax.jit(steps if several else step, donate_argnums=0, compiler_options=options)


def _over_micro_batches(
    micro: Callable, model_state: PyTree, rows: Rows, count: int
) -> tuple[PyTree, Summed]:
    """Runs `micro` over `count` equal parts of the replica's `rows` in turn and adds up the results."""
    if count == 1:
        return micro(model_state, jnp.int32(0), rows)

    def cut(a: jax.Array) -> jax.Array:
        return a.reshape(count, a.shape[0] // count, *a.shape[1:])

    parts = jax.tree.map(cut, rows)

    def body(
        carry: tuple[PyTree, Summed], slot: tuple[jax.Array, Rows]
    ) -> tuple[tuple[PyTree, Summed], None]:
        model_state, sums = carry
        model_state, more = micro(model_state, *slot)
        return (model_state, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)), None

    first = jax.eval_shape(micro, model_state, jnp.int32(0), jax.tree.map(lambda a: a[0], parts))[1]
    # 16-bit gradients are added in float32: in bfloat16 the sum of 256 equal numbers no longer grows.
    zeros = jax.tree.map(lambda s: widened(jnp.zeros(s.shape, s.dtype)), first)
    (model_state, sums), _ = lax.scan(body, (model_state, zeros), (jnp.arange(count), parts))
    return model_state, jax.tree.map(lambda a, s: a.astype(s.dtype), sums, first)
