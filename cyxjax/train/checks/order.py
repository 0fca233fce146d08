"""All checks of a fit before its first step, in order, and of an evaluation. Nothing was written yet."""

from collections.abc import Callable
from typing import Any

import jax

from cyxjax.config.sections import SCHEDULES
from cyxjax.core.exact.step import PartsStep
from cyxjax.core.mesh import num_replicas
from cyxjax.core.objective.global_loss import sees_whole_batch
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.rows import whole_batch as whole_batch_of
from cyxjax.core.step import TrainState
from cyxjax.errors import translated
from cyxjax.launch import environment
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import fingerprints, resume
from cyxjax.train.checks import exactness, whole_batch
from cyxjax.train.checks.batch_checks import BatchChecks, check_batches, check_tuple, watched_samples
from cyxjax.train.checks.learning_rate import check_rates
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.hooks import composite
from cyxjax.train.monitor import watchable_in
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.rank_comparison import compare_ranks
from cyxjax.train.run_state import first_state
from cyxjax.train.schedules import build_schedule
from cyxjax.train.start.dispatch import has_whole_batch, steps_at_once

PyTree = Any


def before_training(plan: Plan, begin: Callable[[], tuple[Program, TrainState]], *, loaded: bool) -> Plan:
    """All checks of a fit. Returns the plan with the facts that all ranks have compared.

    begin: makes the program and the state that training begins with, once configuration and data have been
    checked. loaded: whether that state is of a checkpoint.
    Raises: ConfigError naming the key, DataError naming the sample, DesyncError where ranks differ.
    """
    settings, recipe, group = plan.settings, plan.recipe, plan.group
    mesh, feed, data = group.mesh, plan.feed, plan.data
    assert feed is not None
    assert data is not None
    is_exact, compares_samples = settings.step.is_exact, sees_whole_batch(recipe.loss)

    # Configuration and data
    if is_exact:
        exactness.check_numbered(plan.facts.config, data)
    if compares_samples:
        whole_batch.check_whole_batch(recipe.loss, settings, data)
    if type(plan.inputs) is tuple:
        check_tuple(recipe.fns, plan.inputs)
    program, state = begin()
    if settings.saving.resume == "must" and not loaded:
        resume.refuse_without_steps(settings.saving.folder, group)
    if is_exact:
        exactness.check_machine(settings.step.threads, group.threads, environment.here())
        content = fingerprints.data_of(data)
        exactness.check_reads(fingerprints.numbered(data), content)  # before samples are taken as they are

    # Metrics, learning rate, model
    watchable = watchable_in(recipe.metrics, feed, settings.course)
    watchable.of(settings.watch)
    composite.check_watched(recipe.callbacks, watchable)
    rate, lr = settings.step.rate, getattr(recipe.optimizer, "lr", None)
    # Ours are above 0 in their first step and never below: to ask them compiles each of their operations.
    is_known = rate.name in SCHEDULES and not callable(lr)
    lines = [] if is_known else [check_rates(lr, build_schedule(rate), _num_steps(plan), rate.own)]
    unpadded = is_own(recipe.loss, recipe.metrics) and has_whole_batch(settings.step, mesh)
    if not unpadded:
        lines += whole_batch.check_norms(recipe.fns, settings, plan.inputs)
    for line in filter(None, lines if group.topology.is_master else []):
        warn_on_stderr(line)
    if compares_samples:
        whole_batch.check_same_params(program.sync, settings.step.comm)
    check_batches(data, _batch_checks(plan, program, state))

    # What the run depends on, on all ranks
    facts = plan.facts._replace(data=content if is_exact else fingerprints.data_of(data))
    if is_exact:
        assert isinstance(program.train_step, PartsStep)
        first, rows = first_state(plan, program)[0].state, settings.step.batch.batch_size
        found = fingerprints.exact_of(program.train_step, data, first, rows, group.threads)
        facts = facts._replace(exact=found)
    with translated():  # of operations that the backend lacks, such as some products of float16 on CPUs
        lowered = fingerprints.lower_step(program.train_step, state, data, settings, mesh)
    compare_ranks(group, facts, data, lowered)
    several = steps_at_once(settings.course.steps_per_dispatch, lowered, mesh, indexed=data.indexed)
    return plan._replace(facts=facts, steps_at_once=several)


def before_evaluation(plan: Plan, program: Program, state: TrainState, samples: FitData, size: int) -> Any:
    """All checks of an evaluation in batches of `size`. Returns the samples, checked as they are read.

    Raises: DataError naming the sample; ConfigError for a loss that `samples` cannot be given to.
    """
    dataset = watched_samples(samples, _batch_checks(plan, program, state))
    shape = plan.settings.step.batch._replace(batch_size=size)
    whole_batch.check_full_batches(plan.recipe.loss, dataset, shape, "data")
    return dataset


def _batch_checks(plan: Plan, program: Program, state: TrainState) -> BatchChecks:
    """Model, loss and metrics of a plan, to be checked with samples."""
    step, mesh = plan.settings.step, plan.group.mesh
    is_whole = has_whole_batch(step, mesh)

    def output_shapes(inputs: PyTree) -> PyTree:
        with whole_batch_of(is_whole):
            return jax.eval_shape(program.predict_step, jax.eval_shape(program.consensus, state), inputs)

    here = output_shapes, plan.recipe.loss, plan.recipe.metrics, num_replicas(mesh)
    return BatchChecks(*here, step.batch.batch_size, is_whole, plan.inputs)


def _num_steps(plan: Plan) -> int | None:
    """Optimizer steps of the run; None where that is not known."""
    course, feed = plan.settings.course, plan.feed
    known = None if feed is None or feed.steps_per_epoch is None else course.epochs * feed.steps_per_epoch
    return min(known or course.max_steps or 0, course.max_steps or known or 0) or None
