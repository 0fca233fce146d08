"""Everything that is decided before the first write of a fit, as one frozen value."""

import os
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from cyxjax.checkpoint.manifest import Manifest
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.mesh import local_replicas, num_replicas
from cyxjax.core.model.augment import check_augment
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.data.labels import LabelCheck
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import ConfigError, nearest
from cyxjax.launch.program import own_modules
from cyxjax.train.checkpoints import newest_in
from cyxjax.train.feeding import fit_data
from cyxjax.train.feeding.argument_pairs import one_dataset, paired
from cyxjax.train.feeding.feed import begin_reading, build_feed
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.feeding.placing import keying_for
from cyxjax.train.fingerprints import Facts, config_of
from cyxjax.train.hooks.hook import Feed, Position
from cyxjax.train.program import Recipe
from cyxjax.train.schedules import Resumed
from cyxjax.train.settings import Settings, resolve

_OF_A_RUN_FOLDER = {"run_dir", "mirror", "sinks", "report", "wandb", "profile"}
_OBJECTS = {"model", "data", "loss", "optimizer", "schedule", "metrics", "callbacks"}
"""Sections of an experiment file that name what a program passes as objects."""
_GO_ELSEWHERE = {  # keywords of other libraries' fit -> what to do instead
    **dict.fromkeys(
        ("model", "loss_fn", "optimizer", "metrics", "callbacks", "augment"),
        "pass it to cx.DistributedTrainer.",
    ),
    **dict.fromkeys(("lr", "learning_rate"), "pass it to the optimizer: cx.AdamOptimizer(0.001)."),
    "sample_weight": "put the weights into the targets, and return (values, weights) from the loss.",
    "class_weight": "use cx.CrossEntropyLoss(weight=[...]).",
}


class Plan(NamedTuple):
    """What is trained, on which data, and how: the configuration, resolved for a mesh and for the data."""

    recipe: Recipe
    group: ProcessGroup
    settings: Settings  # with the batch size of the loader, where a loader has one
    inputs: PyTree  # of one sample, shape (1, ...)
    facts: Facts  # what checkpoints store to be compared
    data: FitData = FitData(None, None, True)  # none: only to evaluate, predict or load
    feed: Feed = Feed(lambda position, ask, at_once: (), None, None)
    labels: tuple[LabelCheck, ...] = ()  # of the batches of `feed`: of training and validation data
    own: Manifest | None = None  # the checkpoint in the run's folder that the fit resumes from
    steps_at_once: int = 1  # most steps per dispatch
    step_flops: Callable[[], float] = lambda: 0.0  # of one replica's program; 0.0: not known (exact steps)


def total_steps(plan: Plan, start: Position, first_step: int = 0) -> int | None:
    """The step at which a run from `start` ends; None if it is not known in advance.

    first_step: at which its optimizer began, from which `max_steps` counts.
    """
    course, epoch, each = plan.settings.course, plan.settings.reading.epoch, plan.feed.steps_per_epoch
    most = course.max_steps and first_step + course.max_steps
    if each is None:
        return most
    # The steps of `start` may have had other batches.
    in_this = epoch.rest(start.samples).num_steps if epoch else each - start.step_in_epoch
    ahead = (course.epochs - start.epoch - 1) * each + in_this
    return min(start.step + ahead, most or start.step + ahead)


def fit_arguments(
    data: tuple[Any, ...],
    config: DistributedTrainingConfig | None,
    validation_data: Any,
    settings: dict[str, Any],
) -> tuple[tuple[Any, ...], DistributedTrainingConfig]:
    """(data, configuration) of `fit(*data, config=..., validation_data=..., **settings)`.

    `settings` are keys of the configuration; they override those of `config`, which is not changed. With
    run_dir or another key of a run folder the result is a `TrainConfig`.
    Raises: ConfigError for a keyword that is not a key, and for a run folder that cannot be used.
    """
    given = list(data)
    if given and isinstance(given[-1], DistributedTrainingConfig):
        config = given.pop()
    config = config or DistributedTrainingConfig()
    keys = {*DistributedTrainingConfig.model_fields, *_OF_A_RUN_FOLDER}
    for word in settings:
        if word not in keys:
            hint = _GO_ELSEWHERE.get(word) or nearest(word, keys)
            raise ConfigError(f"fit has no argument {word}. HINT: {hint}", key=word)
    if settings:
        before = {one: getattr(config, one) for one in config.model_fields_set}
        kind = TrainConfig if settings.keys() & _OF_A_RUN_FOLDER else type(config)
        config = kind(**(before | settings))
    if validation_data is not None:
        is_pair = isinstance(validation_data, tuple | list) and len(given) == len(validation_data) == 2
        given = [one_dataset(paired(*given))] if len(given) in (1, 2) and not is_pair else given
        given += list(validation_data) if is_pair else [validation_data]
    if isinstance(config, TrainConfig):
        # The program may change its working folder while it trains.
        config = config.model_copy(update={"run_dir": os.path.abspath(config.run_dir)})
        config.run_folder.refuse_unusable()
    return tuple(given), config


def own_checkpoint(config: DistributedTrainingConfig, group: ProcessGroup) -> Manifest | None:
    """The newest good checkpoint of the run, if a fit of `config` resumes from it; all ranks call it.

    Raises: CheckpointError if all are damaged.
    """
    return newest_in(config.checkpoint_path, group, wanted=config.resume != "never")


def plan_fit(
    recipe: Recipe,
    group: ProcessGroup,
    data: tuple[Any, ...],
    config: DistributedTrainingConfig,
    own: Manifest | None,
    loaded: Mapping[str, Any],
    *,
    schedule: Any,
    named: bool,
) -> Plan:
    """The plan of `fit(*data, config)`. Other modules receive parts of the configuration only.

    own: the checkpoint in the run's folder that the fit resumes from. loaded: metadata of the checkpoint, if
    a state was loaded instead. schedule, named: see `resolve`.
    Raises: ConfigError and DataError for data and configuration that do not match.
    """
    mesh = group.mesh
    found, config = fit_data.parse(data, config, len(local_replicas(mesh)), num_replicas(mesh))
    num_samples = len(found.train) if found.indexed else None
    resumed = Resumed.of(own.meta if own else loaded)
    settings = resolve(
        config,
        num_replicas(mesh),
        num_samples,
        schedule=schedule,
        remat=recipe.remat,
        named=named,
        resumed=resumed,
    )
    found = begin_reading(found, settings.step, settings.reading, mesh)
    inputs = fit_data.one_sample(found)[0]
    augment = "none" if recipe.augment is None else check_augment(recipe.augment, inputs)
    found = found._replace(keying=keying_for(recipe.augment, settings.seed))
    unpadded = is_own(recipe.loss, recipe.metrics)
    labels = LabelCheck(), LabelCheck()
    feed = build_feed(found, settings.step, settings.reading, mesh, unpadded=unpadded, labels=labels)
    values = {name: value for name, value in config.resolved().items() if named or name not in _OBJECTS}
    own_code = {name: digest for name, (digest, _) in own_modules().items()}
    facts = Facts(config_of(values, recipe, augment), own_code=own_code)
    return Plan(recipe, group, settings, inputs, facts, found, feed, labels, own)


def plan_without_data(
    recipe: Recipe,
    group: ProcessGroup,
    inputs: PyTree,
    config: DistributedTrainingConfig | None = None,
) -> Plan:
    """A plan to evaluate, predict or load, for one sample's `inputs`, shape (1, ...). Raises: ConfigError."""
    config = config or DistributedTrainingConfig()
    settings = resolve(config, num_replicas(group.mesh), remat=recipe.remat)
    return Plan(recipe, group, settings, inputs, Facts(config_of(config.resolved(), recipe)))


def plan_of_checkpoint(recipe: Recipe, group: ProcessGroup, meta: Mapping[str, Any]) -> Plan:
    """A plan to evaluate, predict or load, for the inputs and configuration in a checkpoint's metadata.

    A global batch that these replicas cannot share is replaced: only a fit depends on it, which has its own
    configuration.
    """
    known = DistributedTrainingConfig.model_fields.keys() - {"init_from"}  # the checkpoint's values are meant
    config = DistributedTrainingConfig(**{k: v for k, v in meta.get("config", {}).items() if k in known})
    if config.reproducibility == "exact" and num_replicas(group.mesh) > config.virtual_replicas:
        config = config.model_copy(update={"reproducibility": "none"})
    parts = num_replicas(group.mesh) * config.gradient_accumulation_steps
    total = config.global_batch_size
    if total is not None and total % parts and config.reproducibility != "exact":
        config = config.model_copy(update={"global_batch_size": None, "batch_size": -(-total // parts)})
    return plan_without_data(recipe, group, stored_inputs(meta), config)


def input_shapes(inputs: PyTree) -> dict[str, list[Any]]:
    """[shape of a sample, type] of each leaf by name, as JSON values."""
    return {name: [list(leaf.shape[1:]), str(leaf.dtype)] for name, leaf in named_leaves(inputs)}


def stored_inputs(meta: Mapping[str, Any]) -> PyTree:
    """One sample of zeros, in the shape of the inputs that the checkpoint was trained on."""
    leaves = {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in meta["inputs"].items()}
    if set(leaves) == {""}:
        return leaves[""]
    parts, fields = _with_tuples(unflatten_dict(leaves, sep="/")), meta.get("input_fields")
    return namedtuple("Inputs", fields)(*map(parts.get, fields)) if fields else parts


def _with_tuples(tree: PyTree) -> PyTree:
    """`tree` with tuples in place of dicts whose names are 0, 1, ...: names of leaves do not differ."""
    if not isinstance(tree, dict):
        return tree
    parts = {name: _with_tuples(part) for name, part in tree.items()}
    places = [str(i) for i in range(len(parts))]
    return tuple(parts[place] for place in places) if set(places) == set(parts) else parts
