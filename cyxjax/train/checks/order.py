"""All checks of a fit before its first step, in order, and of an evaluation; nothing is written before."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from cyxjax.core.exact.step import PartsStep
from cyxjax.core.mesh import on_host
from cyxjax.core.objective.global_loss import sees_whole_batch
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.step import TrainState
from cyxjax.data.content import drawn_anew
from cyxjax.data.labels import LabelCheck
from cyxjax.errors import CheckpointError, ConfigError, translated
from cyxjax.launch.interrupts import interrupted_at_end
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import fingerprints
from cyxjax.train.checks.batch_checks import (
    check_batches,
    check_full_batches,
    check_norms,
    check_whole_batch,
    expect_labels,
    shapes_of,
)
from cyxjax.train.comparison import compare_ranks
from cyxjax.train.feeding.fit_data import FitData, is_loader, one_sample
from cyxjax.train.hooks import all_callbacks
from cyxjax.train.hooks.hook import Position
from cyxjax.train.monitor import watchable_in
from cyxjax.train.plan import Plan, total_steps
from cyxjax.train.program import Program
from cyxjax.train.run_state import first_state
from cyxjax.train.schedules import RatesAsFactor, Schedule
from cyxjax.train.start.at_once import steps_at_once
from cyxjax.train.start.dispatch import has_whole_batch


@interrupted_at_end(also_at_once=True)
def before_training(plan: Plan, begin: Callable[[], tuple[Program, TrainState]], *, loaded: bool) -> Plan:
    """All checks of a fit. Returns the plan with the facts that all ranks have compared.

    begin: makes the program and the state that training begins with, after configuration and data have been
    checked. loaded: whether that state comes from a checkpoint.
    Raises: ConfigError naming the key, DataError naming the sample, DesyncError if ranks differ.
    """
    settings, recipe, group = plan.settings, plan.recipe, plan.group
    mesh, feed, data, saving = group.mesh, plan.feed, plan.data, plan.settings.saving

    # Configuration and data
    content = _check_exact(plan, data) if settings.step.is_exact else None
    program, state = begin()
    if saving.resume == "must" and not loaded and plan.own is None:
        raise CheckpointError(
            f"resume='must', but {saving.folder} holds no checkpoint. HINT: check the folder, or use "
            "resume='auto'."
        )
    if sees_whole_batch(recipe.loss):
        check_whole_batch(data, plan, program.sync)

    # Metrics, learning rate, model
    watchable = watchable_in(recipe.metrics, feed, settings.course)
    watchable.of(settings.watch)
    all_callbacks.check_watched(recipe.callbacks, watchable)
    all_callbacks.check_state_is_whole(recipe.callbacks, program.sync)
    own = settings.step.rate.own
    if own is not None:
        _check_schedule(own, getattr(recipe.optimizer, "lr", None), total_steps(plan, Position()))
    unpadded = is_own(recipe.loss, recipe.metrics) and has_whole_batch(settings.step, mesh)
    for line in [] if unpadded else check_norms(plan):
        if group.topology.is_master:
            warn_on_stderr(line)
    check_batches(data, plan, program, state)

    # What the run depends on, compared across ranks
    facts = plan.facts._replace(data=content or fingerprints.data_of(data))
    if isinstance(program.train_step, PartsStep):  # an exact run
        first, rows = first_state(plan, program)[0].state, settings.step.batch.batch_size
        found = fingerprints.exact_of(program.train_step, data, first, rows, group.threads)
        facts = facts._replace(exact=found)
    with translated():  # of operations that the backend lacks, such as some products of float16 on CPUs
        several = steps_at_once(plan, program, state)
        lowered = fingerprints.lower_step(program, several, state, data, settings, mesh)
    facts = facts._replace(program=fingerprints.program_of(lowered, settings.step, recipe.metrics))
    compare_ranks(group, facts, data)
    flops = partial(fingerprints.flops_of, lowered)
    return plan._replace(facts=facts, steps_at_once=several, step_flops=flops)


def before_evaluation(
    plan: Plan, program: Program, state: TrainState, samples: FitData, size: int
) -> LabelCheck:
    """All checks of an evaluation in batches of `size`. Returns that of the labels in its batches.

    Raises: DataError naming the sample; ConfigError for a loss that cannot take `samples`.
    """
    labels = LabelCheck()
    looked = shapes_of(plan, program, state, *one_sample(samples))
    expect_labels(labels, samples.train, looked, plan.recipe, "data")
    shape = plan.settings.step.batch._replace(batch_size=size)
    check_full_batches(plan.recipe.loss, samples.train, shape, "data")
    return labels


def _check_exact(plan: Plan, data: FitData) -> dict[str, Any]:
    """Summaries of the data of an exact run. Checks that a sample is the same each time it is read, and that
    the process has the number of CPU threads that the bits depend on.

    Raises: ConfigError if one is not the case.
    """
    if not data.indexed or plan.facts.config.get("global_batch_size") is None or is_loader(data.val):
        raise ConfigError(
            "reproducibility='exact' reads samples by number, but the data come from a loader, whose batches "
            "depend on the processes. HINT: pass arrays or the dataset itself, and set global_batch_size."
        )
    wanted, threads = plan.settings.step.threads, plan.group.threads
    if jax.default_backend() == "cpu" and wanted is not None and threads != wanted:
        raise ConfigError(
            f"this process computes with {threads} CPU threads, reproducibility='exact' with {wanted} "
            f"(exact_threads, or virtual_replicas): the number of threads changes the bits. HINT: call "
            f"cx.distributed.init(threads={wanted}) first, or set exact_threads."
        )
    content = fingerprints.data_of(data)
    for name, found in content.items():
        if again := drawn_anew(found):
            raise ConfigError(
                f"sample {again[0]} of the {name} differs when it is read again, which "
                "reproducibility='exact' does not allow. HINT: compute each row in `take` from its index, "
                "and augment with augment=."
            )
    return content


def _check_schedule(own: Schedule, lr: Any, num_steps: int | None) -> None:
    """Raises: ConfigError for a user's schedule that is below 0 or NaN at a step of the run, or whose values
    look like learning rates, not factors.

    A factor starts or peaks at about 1. If all its values are below 0.1, or at most the learning rate, the
    result is a rate that nobody wants: 1e-6 for Adam(1e-3) and a schedule that starts at 1e-3.
    lr: the optimizer's, a number or a schedule; None if not known. About 30 steps are evaluated.
    """
    steps = np.unique(np.linspace(0, (num_steps or 2) - 1, 32).astype(np.int32))
    with on_host():
        values = np.asarray(jax.jit(jax.vmap(own))(steps), np.float64)
    least, largest = float(values.min()), float(values.max())
    is_below_lr = isinstance(lr, int | float) and 0 < largest <= lr < 1
    are_rates = not isinstance(own, RatesAsFactor) and (0 < largest < 0.1 or is_below_lr)
    if are_rates or not least >= 0:
        raise ConfigError(
            f"schedule is {least:.4g} to {largest:.4g} in this run and multiplies the optimizer's rate. "
            "HINT: fit(..., lr_schedule=...) takes learning rates; a factor starts or peaks at 1, and is "
            "never below 0, where a step would ascend the gradient.",
            key="schedule",
        )
