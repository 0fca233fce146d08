"""All checks of a run before its first step, in the order in which they are made. Nothing was written yet."""

from typing import Any

import jax

from cyxjax.core.exact.step import PartsStep
from cyxjax.core.mesh import num_replicas
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.rows import whole_batch as whole_batch_of
from cyxjax.core.step import TrainState
from cyxjax.launch import environment
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import fingerprints, resume
from cyxjax.train.checks import exactness, learning_rate, precision, whole_batch
from cyxjax.train.feeding import check_data
from cyxjax.train.feeding.taken import Taker, refuse_untaken_tuple
from cyxjax.train.hooks import callbacks
from cyxjax.train.monitor import watchable_in
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.rank_comparison import compare_ranks
from cyxjax.train.rates.schedules import build_schedule
from cyxjax.train.run_state import first_state
from cyxjax.train.start.dispatch import has_whole_batch

PyTree = Any


def before_building(plan: Plan) -> None:
    """Of configuration and data, before the model is traced.

    Raises: ConfigError and DataError for what does not go together.
    """
    assert plan.data is not None
    exactness.check_numbered(plan.facts.config, plan.data)
    whole_batch.check_whole_batch(plan.recipe.loss, plan.settings, plan.data)
    refuse_untaken_tuple(plan.recipe.fns, plan.inputs)


def before_training(plan: Plan, program: Program, state: TrainState, *, loaded: bool) -> Plan:
    """Of the run that is about to begin with `state`. Returns the plan with what its data hold, which all
    ranks have compared, and what the bits of an exact run depend on.

    loaded: whether `state` is of a checkpoint that was loaded.
    Raises: ConfigError naming the key, DataError naming the sample, DesyncError where ranks differ.
    """
    settings, recipe, group = plan.settings, plan.recipe, plan.group
    mesh, feed, data = group.mesh, plan.feed, plan.data
    assert feed is not None
    assert data is not None
    if settings.saving.resume == "must" and not loaded:
        resume.refuse_without_steps(settings.saving.folder, group)
    exactness.check_threads(settings.exactness, group.threads)
    exactness.check_flags(settings.exactness, environment.here())
    exactness.check_apart(settings.exactness, fingerprints.numbered(data))
    exact: dict[str, str] = {}
    if isinstance(program.train_step, PartsStep):
        first, rows = first_state(plan, program)[0].state, settings.step.batch.batch_size
        exact = fingerprints.exact_of(program.train_step, data, first, rows, group.threads)
    watchable = watchable_in(recipe.metrics, feed, settings.course)
    watchable.of(settings.watch)
    callbacks.check_watched(recipe.callbacks, watchable)
    rate, lr, steps = settings.step.rate, getattr(recipe.optimizer, "lr", None), _num_steps(plan)
    learning_rate.refuse_rates_as_factors(rate, lr, steps)
    lines = [learning_rate.refuse_rates(lr, build_schedule(rate), steps)]
    unpadded = is_own(recipe.loss, recipe.metrics) and has_whole_batch(settings.step, mesh)
    lines += whole_batch.check_norms(recipe.fns, settings, plan.inputs, unpadded=unpadded)
    for line in filter(None, lines if group.topology.is_master else []):
        warn_on_stderr(line)
    whole_batch.check_same_params(recipe.loss, program.sync, settings.step.comm)
    precision.check_precision(program, state, plan.inputs, settings.step.precision, num_replicas(mesh))
    check_data.check(data, taker(plan, program, state))
    facts = plan.facts._replace(data=fingerprints.data_of(data), exact=exact)
    step = fingerprints.program_of(program.train_step, state, data, settings, mesh)
    compare_ranks(group, facts, data, step)
    exactness.check_repeats(settings.exactness, facts.data)
    return plan._replace(facts=facts)


def taker(plan: Plan, program: Program, state: TrainState) -> Taker:
    """Model, loss and metrics of a plan, to be tried on samples."""
    step, mesh = plan.settings.step, plan.group.mesh
    is_whole = has_whole_batch(step, mesh)

    def output_shapes(inputs: PyTree) -> PyTree:
        with whole_batch_of(is_whole):
            return jax.eval_shape(program.predict_step, jax.eval_shape(program.consensus, state), inputs)

    here = output_shapes, plan.recipe.loss, plan.recipe.metrics, num_replicas(mesh)
    return Taker(*here, step.batch.batch_size, is_whole, plan.inputs)


def _num_steps(plan: Plan) -> int | None:
    """Of the run, where it is known."""
    course, feed = plan.settings.course, plan.feed
    known = None if feed is None or feed.steps_per_epoch is None else course.epochs * feed.steps_per_epoch
    return min(known or course.max_steps or 0, course.max_steps or known or 0) or None
