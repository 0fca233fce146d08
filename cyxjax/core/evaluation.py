"""Evaluation and prediction, compiled for a mesh."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cyxjax.core.losses import PerExample
from cyxjax.core.memory import memory_options, with_whole
from cyxjax.core.mesh import PER_REPLICA, REPLICATED, num_replicas
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.model.outputs import refuse_of_batch
from cyxjax.core.objective.split_check import SplitCheck, split_check
from cyxjax.core.objective.terms import flat_shares, shares_of
from cyxjax.core.replica import from_replica, model_map, psum, sync_map, to_replica
from cyxjax.core.rows import is_whole_batch, whole_batch
from cyxjax.core.step import BATCH_SPEC, NO_CHECK, Batch, TrainState, with_checks
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree


class EvalState(NamedTuple):
    """The part of a state that evaluation reads; params are whole, or a replica's parts (`_eval_spec`)."""

    params: PyTree
    model_state: PyTree
    key: jax.Array

    @classmethod
    def of(cls, state: TrainState) -> "EvalState":
        return cls(state.params, state.model_state, state.key)


def build_consensus(sync: Sync, mesh: Mesh) -> Callable[[TrainState], TrainState]:
    """A function state -> the state to evaluate, whose parameters are whole and equal on all replicas.

    It returns the state unchanged unless replicas may differ or keep parts. Otherwise it costs communication:
    call it once before the batches. (Where replicas keep parts, `build_eval_step(parts=...)` avoids it.)
    """
    if sync.params_spec == REPLICATED:
        return lambda state: state
    agree = lambda params: sync.consensus(to_replica(params, sync.params_spec))  # noqa: E731
    mapped = jax.jit(sync_map(agree, mesh, (sync.params_spec,), REPLICATED))
    return lambda state: state._replace(params=mapped(state.params))


def build_eval_step(
    fns: ModelFns, loss: PerExample, mesh: Mesh, *, metrics: Metrics | None = None, parts: Sync | None = None
) -> Callable[[EvalState, Batch], jax.Array]:
    """A function (state, batch) -> metric sums float32 (number of metrics, 2), in evaluation mode; on
    several replicas they are followed by what `split_check` compares.

    `state` is what evaluation reads of a state that `build_consensus` returns: its parameters are replicated.
    With `parts`, a strategy that keeps parts of them, it is that of the training state itself, and no replica
    holds all parameters.
    """
    measured, spec = metrics or Metrics(), _eval_spec(parts)
    fns, is_whole = with_whole(fns, parts) if parts else fns, num_replicas(mesh) == 1
    check = NO_CHECK if is_whole else split_check(loss, measured)

    def local(state: EvalState, batch: Batch) -> jax.Array:
        with whole_batch(is_whole):
            output = infer(fns, to_replica(state, spec), batch.inputs)
            sums = score(loss, measured, check, output, batch.targets, batch.weight)
        return from_replica(sums, PER_REPLICA)

    model = model_map(local, mesh, (spec, BATCH_SPEC), PER_REPLICA)
    reduce = sync_map(lambda rows: psum(rows[0]), mesh, PER_REPLICA, REPLICATED)
    options = memory_options(mesh) if parts else {}

    def evaluate(state: EvalState, batch: Batch) -> jax.Array:
        return reduce(model(state, batch))

    return jax.jit(evaluate, compiler_options=options)


def score(
    loss: PerExample, metrics: Metrics, check: SplitCheck, output: PyTree, target: PyTree, weight: jax.Array
) -> jax.Array:
    """Metric sums of the rows of one replica in evaluation, followed by the rows of `check`."""
    losses = flat_shares(shares_of(loss, output, target, weight))
    sums = metrics.sums(losses, output, target, weight)
    return with_checks(sums, check.rows(output, target) if check.measures else None)


def build_predict_step(
    fns: ModelFns, mesh: Mesh, *, parts: Sync | None = None
) -> Callable[[EvalState, PyTree], PyTree]:
    """A function (state, inputs) -> outputs, rows split along axis `data` as the inputs are.

    state and parts: as in `build_eval_step`. An output without rows, made of parameters, is returned once.
    """
    spec, whole_fns = _eval_spec(parts), with_whole(fns, parts) if parts else fns

    def predict(state: EvalState, inputs: PyTree) -> PyTree:
        has_rows: list[bool] = []

        def local(state: EvalState, inputs: PyTree) -> PyTree:
            leaves, form = jax.tree.flatten(infer(whole_fns, to_replica(state, spec), inputs))
            has_rows[:] = [leaf.ndim > 0 for leaf in leaves]
            return jax.tree.unflatten(form, [jnp.atleast_1d(leaf) for leaf in leaves])

        mapped = model_map(local, mesh, (spec, PER_REPLICA), PER_REPLICA)
        leaves, form = jax.tree.flatten(mapped(state, inputs))
        whole = [leaf if rows else leaf[0] for leaf, rows in zip(leaves, has_rows, strict=True)]
        output = jax.tree.unflatten(form, whole)
        if not is_whole_batch():
            refuse_of_batch(fns, output, inputs)
        return output

    return jax.jit(predict, compiler_options=memory_options(mesh) if parts else {})


def _eval_spec(parts: Sync | None) -> EvalState:
    return EvalState._make([parts.params_spec if parts else REPLICATED, REPLICATED, REPLICATED])


def infer(fns: ModelFns, state: EvalState, inputs: PyTree) -> PyTree:
    """The model's output in evaluation mode, on one replica."""
    key = jax.random.wrap_key_data(state.key)  # evaluation draws nothing: any key will do
    return fns.apply(state.params, state.model_state, inputs, key, False)[0]
