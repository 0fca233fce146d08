"""All of a fit that comes before its first write, computed once: what fit, plan and replay start from."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.first_parts import build_draw, holds_values
from cyxjax.core.mesh import REPLICATED, local_replicas, local_value, num_replicas, put_replicated
from cyxjax.core.model.augment import check_augment
from cyxjax.core.objective.log_probabilities import refuse_scores, takes_log_probabilities
from cyxjax.core.objective.own_loss import is_the_models_own, refuse_coupled_loss
from cyxjax.core.step import TrainState
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.feeding import check_data, fit_data
from cyxjax.train.feeding.feed import build_feed
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.feeding.keying import keying_for
from cyxjax.train.feeding.predicting import predict_all, source_of
from cyxjax.train.feeding.taken import Taker, refuse_untaken_tuple
from cyxjax.train.hooks import callbacks
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.loop import Feed, Position, RunState
from cyxjax.train.monitor import watchable_in
from cyxjax.train.rates.plan import refuse_idle_base
from cyxjax.train.rates.schedules import build_schedule, refuse_rates, refuse_rates_as_factors
from cyxjax.train.settings import FirstValues, Settings, resolve
from cyxjax.train.start.build import Built, Recipe, build, check_precision
from cyxjax.train.start.init_from import taken
from cyxjax.train.start.whole_batch import check_norms, check_same_params, check_whole_batch

PyTree = Any


class Prepared(NamedTuple):
    """Compiled functions, and what they were compiled for."""

    settings: Settings  # with the batch size of the loader, where a loader has one
    built: Built
    inputs: PyTree  # one sample's, shape (1, ...)
    feed: Feed | None = None  # None: not to train, but to evaluate, predict or load
    data: FitData | None = None
    augment: str = ""  # what tells it from others; "" where nothing is to be trained


def for_fit(
    recipe: Recipe,
    mesh: Mesh,
    data: tuple[Any, ...],
    config: DistributedTrainingConfig | None,
    tape: Tape,
    *,
    schedule: Any,
    remat: str,
    last: Prepared | None,
) -> Prepared:
    """What `fit(*data, config)` needs; the compiled functions of `last` serve again if plans agree.

    Here the configuration ends: what comes after takes its parts.
    Raises: ConfigError and DataError for data and configuration that do not go together.
    """
    found, config = fit_data.parse(data, config, len(local_replicas(mesh)), num_replicas(mesh))
    fit_data.check_numbered(config, found)
    fit_data.check_epochs(config, found)
    refuse_idle_base(config)
    found = check_data.first_step(found, config.gradient_accumulation_steps)
    num_samples = len(found.train) if found.indexed else None
    settings = resolve(config, num_replicas(mesh), num_samples, schedule=schedule, remat=remat)
    check_whole_batch(recipe.loss, settings, found)
    inputs = check_data.one_input(found)
    refuse_untaken_tuple(recipe.fns, inputs)
    one = for_inputs(recipe, mesh, settings, inputs, last)
    augment = check_augment(recipe.augment, one.inputs)
    found = found._replace(keying=keying_for(recipe.augment, settings.seed))
    feed = build_feed(found, settings.step, settings.reading, mesh, tape)
    return one._replace(feed=feed, data=found, augment=augment)


def for_inputs(
    recipe: Recipe, mesh: Mesh, settings: Settings, inputs: PyTree, last: Prepared | None = None
) -> Prepared:
    """Compiled functions for one sample's `inputs`, shape (1, ...). Raises: ConfigError."""
    if last is not None and last.settings.step == settings.step:
        return Prepared(settings, last.built, inputs)
    return Prepared(settings, build(recipe, settings.step, mesh, inputs=inputs), inputs)


def check_run(prepared: Prepared, state: TrainState, recipe: Recipe, mesh: Mesh, taker: Taker) -> None:
    """What is watched is measured; the optimizer fits the parameters and the strategy; the model takes the
    data in the precision asked for, on this backend; the loss is a mean over samples; the data are finite.

    state: as training starts with it; only shapes are looked at. What is compiled is small, but for a model
        that computes its own loss.
    Raises: ConfigError naming the monitor, the optimizer, the loss or the precision, DataError naming the
        sample.
    """
    built, replicas = prepared.built, num_replicas(mesh)
    if prepared.feed is not None:
        watchable = watchable_in(recipe.metrics, prepared.feed, prepared.settings.course)
        watchable.of(prepared.settings.watch)
        callbacks.check_watched(recipe.callbacks, watchable)
    told = []
    if prepared.feed is not None:
        rate, lr = prepared.settings.step.rate, getattr(recipe.optimizer, "lr", None)
        refuse_rates_as_factors(rate, lr, _num_steps(prepared))
        told += [refuse_rates(lr, build_schedule(rate), _num_steps(prepared))]
        told += recipe.fns.told(prepared.inputs)
        told += check_norms(recipe.fns, prepared.settings, prepared.inputs)
    for line in filter(None, told if not local_replicas(mesh).start else []):
        warn_on_stderr(line)
    check_same_params(recipe.loss, built.sync, prepared.settings.step.comm)
    if prepared.data is not None and is_the_models_own(recipe.loss):
        refuse_coupled_loss(built.fns, check_data.telling_samples(prepared.data)[0])
    check_precision(built, state, prepared.inputs, prepared.settings.step.precision, replicas)
    if prepared.data is not None:
        check_data.check(prepared.data, taker)
        if takes_log_probabilities(recipe.loss):
            few = check_data.a_few_inputs(prepared.data)
            output = predict_all(built.predict_step, built.program.consensus(state), mesh, source_of(few), 1)
            refuse_scores(recipe.loss, output)


def _num_steps(prepared: Prepared) -> int | None:
    """Of the run, where it is known."""
    course, feed = prepared.settings.course, prepared.feed
    known = None if feed is None or feed.steps_per_epoch is None else course.epochs * feed.steps_per_epoch
    return min(known or course.max_steps or 0, course.max_steps or known or 0) or None


def first_run(
    prepared: Prepared, mesh: Mesh, num_metrics: int, *, first: FirstValues | None = None
) -> tuple[RunState, list[str]]:
    """(step 0, what to tell of its parameters): drawn from the seed, or what `first` names."""
    built, seed, inputs = prepared.built, prepared.settings.seed, prepared.inputs
    told: list[str] = []
    first = first if first is not None and first.path is not None else None
    if first is None and built.sync.keeps_parts and not holds_values(built.fns, inputs):
        state = build_draw(built.fns, built.sync, mesh)(seed, inputs)
    else:
        drawn = built.fns.init(jax.random.key(seed), inputs)
        params, model_state = jax.tree.map(np.asarray, drawn)
        if first is not None:
            params, model_state, told = taken(first, params, model_state)
        params, model_state = put_replicated(mesh, (params, model_state))
        state = built.init(params, model_state, seed)
    return RunState(Position(), state, np.zeros((num_metrics, 2))), told


def next_run(prepared: Prepared, mesh: Mesh, agreed: TrainState, num_metrics: int) -> RunState:
    """A new run from the parameters of `agreed`; steps count on, so that keys and folders stay apart."""
    params, model_state = jax.tree.map(partial(_on_mesh, mesh), (agreed.params, agreed.model_state))
    state = prepared.built.init(params, model_state, prepared.settings.seed)
    steps = local_value(agreed.step)
    state = state._replace(step=put_replicated(mesh, steps))
    return RunState(Position(int(steps)), state, np.zeros((num_metrics, 2)))


def _on_mesh(mesh: Mesh, leaf: jax.Array) -> jax.Array:
    """`leaf` as `first_run` puts its own, so that one program makes both states; no copy where it lies so."""
    lies_so = leaf.sharding == NamedSharding(mesh, REPLICATED)
    return leaf if lies_so else put_replicated(mesh, local_value(leaf))
