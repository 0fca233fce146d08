"""All checks of a run before its first step, in the order in which they are made. Nothing was written yet."""

from typing import Any

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.mesh import local_replicas, num_replicas
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.step import TrainState
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.launch import environment
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import resume
from cyxjax.train.checks import exactness, learning_rate, precision, whole_batch
from cyxjax.train.feeding import check_data, fit_data
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.feeding.taken import Taker, refuse_untaken_tuple
from cyxjax.train.hooks import callbacks
from cyxjax.train.monitor import watchable_in
from cyxjax.train.program import Recipe
from cyxjax.train.rates.schedules import build_schedule
from cyxjax.train.settings import Settings
from cyxjax.train.start import consistency, exact
from cyxjax.train.start.dispatch import has_whole_batch
from cyxjax.train.start.prepare import Prepared

PyTree = Any


def before_building(
    recipe: Recipe, config: DistributedTrainingConfig, settings: Settings, data: FitData, inputs: PyTree
) -> None:
    """Of configuration and data, before the model is traced. inputs: one sample's, (1, ...).

    Raises: ConfigError and DataError for what does not go together.
    """
    fit_data.check_numbered(config, data)
    fit_data.check_epochs(config, data)
    learning_rate.refuse_idle_base(config)
    whole_batch.check_whole_batch(recipe.loss, settings, data)
    refuse_untaken_tuple(recipe.fns, inputs)


def before_training(
    prepared: Prepared,
    state: TrainState,
    recipe: Recipe,
    group: ProcessGroup,
    taker: Taker,
    *,
    loaded: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Of the run that is about to begin with `state`. Returns what its data hold, which all ranks have
    compared, and what the bits of an exact run depend on.

    loaded: whether `state` is of a checkpoint that was loaded.
    Raises: ConfigError naming the key, DataError naming the sample, DesyncError where ranks differ.
    """
    settings, program, mesh = prepared.settings, prepared.program, group.mesh
    feed, data = prepared.feed, prepared.data
    assert feed is not None
    assert data is not None
    if settings.saving.resume == "must" and not loaded:
        resume.refuse_without_steps(settings.saving.folder, group)
    exactness.check_threads(settings.exactness, group.threads)
    exactness.check_flags(settings.exactness, environment.here())
    exactness.check_apart(settings.exactness, consistency.numbered(data))
    fingerprint = exact.fingerprint(prepared, group.threads)
    watchable = watchable_in(recipe.metrics, feed, settings.course)
    watchable.of(settings.watch)
    callbacks.check_watched(recipe.callbacks, watchable)
    rate, lr, steps = settings.step.rate, getattr(recipe.optimizer, "lr", None), _num_steps(prepared)
    learning_rate.refuse_rates_as_factors(rate, lr, steps)
    lines = [learning_rate.refuse_rates(lr, build_schedule(rate), steps)]
    unpadded = is_own(recipe.loss, recipe.metrics) and has_whole_batch(settings.step, mesh)
    lines += whole_batch.check_norms(recipe.fns, settings, prepared.inputs, unpadded=unpadded)
    for line in filter(None, lines if not local_replicas(mesh).start else []):
        warn_on_stderr(line)
    whole_batch.check_same_params(recipe.loss, program.sync, settings.step.comm)
    precision.check_precision(program, state, prepared.inputs, settings.step.precision, num_replicas(mesh))
    check_data.check(data, taker)
    content = consistency.compared(group, prepared, state, fingerprint)
    exactness.check_repeats(settings.exactness, content)
    return content, fingerprint


def _num_steps(prepared: Prepared) -> int | None:
    """Of the run, where it is known."""
    course, feed = prepared.settings.course, prepared.feed
    known = None if feed is None or feed.steps_per_epoch is None else course.epochs * feed.steps_per_epoch
    return min(known or course.max_steps or 0, course.max_steps or known or 0) or None
