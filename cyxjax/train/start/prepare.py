"""All of a fit that comes before its first write, computed once: what fit, plan and replay start from."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.mesh import REPLICATED, local_replicas, local_value, num_replicas, put_replicated
from cyxjax.core.model.augment import check_augment
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.portable import build_draw, holds_values
from cyxjax.core.step import TrainState
from cyxjax.train.feeding import check_data, fit_data
from cyxjax.train.feeding.feed import build_feed
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.feeding.keying import keying_for
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.loop import Feed, Position, RunState
from cyxjax.train.program import Program, Recipe, build_program
from cyxjax.train.settings import FirstValues, Settings, resolve
from cyxjax.train.start.init_from import taken

PyTree = Any


class Prepared(NamedTuple):
    """Compiled functions, and what they were compiled for."""

    settings: Settings  # with the batch size of the loader, where a loader has one
    program: Program
    inputs: PyTree  # one sample's, shape (1, ...)
    feed: Feed | None = None  # None: not to train, but to evaluate, predict or load
    data: FitData | None = None
    augment: str = ""  # what tells it from others; "" where nothing is to be trained
    content: dict[str, Any] = {}  # what the data hold
    fingerprint: dict[str, str] = {}  # what the bits of an exact run depend on, here and now
    own_code: dict[str, str] = {}  # digests of the user's files that run
    lines: tuple[str, ...] = ()  # about the values that training begins with


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
    check: Callable[[Recipe, DistributedTrainingConfig, Settings, FitData, PyTree], None],
) -> Prepared:
    """What `fit(*data, config)` needs; the compiled functions of `last` serve again if plans agree.

    check: called before the model is traced. Here the configuration ends: what comes after takes its parts.
    Raises: ConfigError and DataError for data and configuration that do not go together.
    """
    found, config = fit_data.parse(data, config, len(local_replicas(mesh)), num_replicas(mesh))
    found = check_data.first_step(found, config.gradient_accumulation_steps)
    num_samples = len(found.train) if found.indexed else None
    settings = resolve(config, num_replicas(mesh), num_samples, schedule=schedule, remat=remat)
    inputs = check_data.one_input(found)
    check(recipe, config, settings, found, inputs)
    one = for_inputs(recipe, mesh, settings, inputs, last)
    augment = check_augment(recipe.augment, one.inputs)
    found = found._replace(keying=keying_for(recipe.augment, settings.seed))
    unpadded = is_own(recipe.loss, recipe.metrics)
    feed = build_feed(found, settings.step, settings.reading, mesh, tape, unpadded=unpadded)
    return one._replace(feed=feed, data=found, augment=augment)


def for_inputs(
    recipe: Recipe, mesh: Mesh, settings: Settings, inputs: PyTree, last: Prepared | None = None
) -> Prepared:
    """Compiled functions for one sample's `inputs`, shape (1, ...). Raises: ConfigError."""
    if last is not None and last.settings.step == settings.step:
        return Prepared(settings, last.program, inputs)
    return Prepared(settings, build_program(recipe, settings.step, mesh, inputs=inputs), inputs)


def first_run(
    prepared: Prepared, mesh: Mesh, num_metrics: int, *, first: FirstValues | None = None
) -> tuple[RunState, list[str]]:
    """(step 0, what to tell of its parameters): drawn from the seed, or what `first` names."""
    program, seed, inputs = prepared.program, prepared.settings.seed, prepared.inputs
    told: list[str] = []
    first = first if first is not None and first.path is not None else None
    if first is None and program.sync.keeps_parts and not holds_values(program.fns, inputs):
        state = build_draw(program.fns, program.sync, mesh)(seed, inputs)
    else:
        drawn = program.fns.init(jax.random.key(seed), inputs)
        params, model_state = jax.tree.map(np.asarray, drawn)
        if first is not None:
            params, model_state, told = taken(first, params, model_state)
        params, model_state = put_replicated(mesh, (params, model_state))
        state = program.init(params, model_state, seed)
    return RunState(Position(), state, np.zeros((num_metrics, 2))), told


def next_run(prepared: Prepared, mesh: Mesh, agreed: TrainState, num_metrics: int) -> RunState:
    """A new run from the parameters of `agreed`; steps count on, so that keys and folders stay apart."""
    params, model_state = jax.tree.map(partial(_on_mesh, mesh), (agreed.params, agreed.model_state))
    state = prepared.program.init(params, model_state, prepared.settings.seed)
    steps = local_value(agreed.step)
    state = state._replace(step=put_replicated(mesh, steps))
    return RunState(Position(int(steps)), state, np.zeros((num_metrics, 2)))


def _on_mesh(mesh: Mesh, leaf: jax.Array) -> jax.Array:
    """`leaf` as `first_run` puts its own, so that one program makes both states; no copy where it lies so."""
    lies_so = leaf.sharding == NamedSharding(mesh, REPLICATED)
    return leaf if lies_so else put_replicated(mesh, local_value(leaf))
