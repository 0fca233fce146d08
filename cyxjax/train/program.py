"""The compiled functions of a run: the one place where the features of a plan are composed."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from cyxjax.core.evaluation import EvalState, build_consensus, build_predict_step
from cyxjax.core.losses import PerExample, as_per_example
from cyxjax.core.memory import with_offload, with_remat
from cyxjax.core.metrics import Metrics, metrics_of
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.augment import Augment, as_augment, with_augment
from cyxjax.core.model.lora import ADAPTERS, with_frozen, with_lora
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.split_check import SplitCheck, split_check
from cyxjax.core.optimizer import adapted
from cyxjax.core.precision import parse_policy, skip_nonfinite, with_loss_scale, with_policy
from cyxjax.core.sentinel import Sentinel, build_sentinel
from cyxjax.core.step import Batch, TrainState, build_init, state_spec
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree, matches
from cyxjax.sync.in_groups import for_part, part_of, trained
from cyxjax.sync.registry import build_sync
from cyxjax.train.hooks import all_callbacks
from cyxjax.train.hooks.hook import Hook, Position, RunState, StepInfo
from cyxjax.train.hooks.progress import Rate
from cyxjax.train.schedules import build_schedule, rate_at
from cyxjax.train.settings import StepPlan
from cyxjax.train.start.dispatch import steps_for
from cyxjax.train.start.optimizer_groups import (
    OptimizerGroup,
    build_grouped,
    groups_of,
    is_frozen,
    with_loss_value,
)

_FOR_NONFINITE: dict[bool | str, Callable[[Sync], Sync]] = {
    True: with_loss_scale,  # float16: gradients beyond its range are expected
    "skip": skip_nonfinite,
    "abort": lambda sync: sync,
    "rollback": skip_nonfinite,  # so that a saved state is always good
}


class Recipe(NamedTuple):
    """The arguments that the user gave to a trainer."""

    fns: ModelFns
    loss: PerExample
    optimizer: optax.GradientTransformation | None  # None: every term of the loss has its own
    metrics: Metrics
    callbacks: tuple[Hook, ...] = ()
    augment: Augment | None = None
    remat: str = "none"  # what backward recomputes; "none": as configured


def recipe_of(
    model: Any, loss_fn: Any, optimizer: Any, metrics: Any, callbacks: Iterable[Hook], augment: Any
) -> Recipe:
    """The arguments of a trainer in the forms that the steps take.

    Raises: ConfigError for an unknown name of a loss or optimizer, and for an argument of a wrong type.
    """
    if isinstance(loss_fn, str) or isinstance(optimizer, str):
        from cyxjax.train.start.named import loss_named, optimizer_named

        loss_fn = loss_named(loss_fn) if isinstance(loss_fn, str) else loss_fn
        optimizer = optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
    loss = as_per_example(loss_fn)
    groups_of(loss, optimizer)  # each term has an optimizer
    return Recipe(
        fns=adapt(model),
        loss=loss,
        optimizer=optimizer,
        metrics=metrics_of(loss_fn, metrics),
        callbacks=tuple(all_callbacks.checked(callbacks)),
        augment=as_augment(augment),
    )


class Program(NamedTuple):
    """The compiled functions of a recipe on a mesh; fits with equal plans and shapes of inputs share one."""

    train_step: Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]
    train_steps: Any  # (state, several batches, first, stop) -> (state, sums of each); None: one at a time
    eval_step: Callable[[EvalState, Batch], jax.Array]
    predict_step: Any  # jitted: (EvalState, inputs) -> outputs
    consensus: Callable[[TrainState], EvalState]  # what evaluation sees of a state
    agreed: Callable[[TrainState], TrainState]  # the state all replicas agree on, with whole parameters
    evaluated: Callable[[TrainState], TrainState]  # the state that evaluation sees, with whole parameters
    init: Callable[[PyTree, PyTree, int], TrainState]  # (params, model_state, seed) -> the first state
    metrics: Metrics
    check: SplitCheck  # of what the steps compare, in the last rows of their sums
    learning_rate: Rate  # of a number of updates; None if the optimizer does not know it
    sentinel: Sentinel
    fns: ModelFns
    sync: Sync

    def state_shapes(self, inputs: PyTree) -> TrainState:
        """Shapes and types of the state before the first step, for one sample's `inputs`."""
        drawn = jax.eval_shape(self.fns.init, jax.random.key(0), inputs)
        return jax.eval_shape(lambda params, model_state: self.init(params, model_state, 0), *drawn)

    def read_sums(self, position: Position, handle: jax.Array, at: Any = ...) -> StepInfo:
        """The numbers of the training step that ended at `position`; at: its place among several."""
        rows, count = np.asarray(handle, np.float64)[at], self.metrics.num_training_rows
        left_out = bool(rows[count - 1, 1] < 0)  # `LEFT_OUT`
        sums = rows[:count]
        if left_out:
            sums[-1] = 0.0  # it has no norm
        return StepInfo(position, sums, (rows[count, 0], rows[count, 1]), left_out, rows[count + 1 :])

    def training_means(self, first: Position, moment: RunState, skipped: int) -> dict[str, Any]:
        """Means over the epoch's steps from `first` up to `moment`. NaN if no step counts: all were left out
        as not finite, or a rollback left none.

        skipped: steps that the run has left out.
        Raises: DataError if the samples have zero weight in the loss; not once the run has left out a step.
        """
        if moment.position.step > first.step and not skipped:
            return self.metrics.over_all(moment.sums, "an epoch of training")
        return self.metrics.means(moment.sums)


def build_program(recipe: Recipe, plan: StepPlan, mesh: Mesh, *, inputs: PyTree) -> Program:
    """The functions that `plan` asks for. inputs: one sample's, for the shapes of the parameters.

    Raises: ConfigError for values that cannot be combined.
    """
    policy = parse_policy(plan.precision)
    fns = with_lora(with_policy(recipe.fns, policy), plan.lora)
    factor, given = build_schedule(plan.rate), groups_of(recipe.loss, recipe.optimizer)
    fns = with_frozen(with_remat(fns, plan.remat), _is_frozen(given, plan))
    fns = with_augment(fns, recipe.augment)  # before anything is cast: it sees the data's own types

    def around(group: OptimizerGroup) -> OptimizerGroup:
        # An update is proportional to the learning rate, so one factor on it works for every transformation.
        # The optimizer of a group counts its own updates, the schedule counts the steps of the run.
        scale = optax.scale_by_schedule(lambda n: factor(n * group.every + group.offset))
        rated = optax.chain(group.optimizer, scale)
        return group._replace(optimizer=adapted(all_callbacks.around(recipe.callbacks, rated)))

    groups = [around(group) for group in with_loss_value(given)]
    shapes = lambda: jax.eval_shape(fns.init, jax.random.key(0), inputs)[0]  # noqa: E731
    sync = _strategy(plan, groups, shapes, _FOR_NONFINITE[policy.needs_loss_scale or plan.on_nonfinite])
    sync = with_offload(sync, mesh, plan.offload)
    train_step, train_steps, eval_step = steps_for(plan, mesh, fns, recipe.loss, sync, recipe.metrics)
    agreed = build_consensus(sync, mesh)
    parts = sync if sync.keeps_parts else None  # evaluation gathers them itself, one leaf at a time
    seen = lambda state: all_callbacks.evaluated(recipe.callbacks, state if parts else agreed(state))  # noqa: E731
    of_callbacks = partial(all_callbacks.learning_rate_factor, recipe.callbacks)
    return Program(
        train_step=train_step,
        train_steps=train_steps,
        eval_step=eval_step,
        predict_step=build_predict_step(fns, mesh, parts=parts),
        consensus=lambda state: EvalState.of(seen(state)),
        agreed=agreed,
        evaluated=lambda state: agreed(seen(state)) if parts else seen(state),
        init=build_init(sync, mesh),
        metrics=recipe.metrics,
        check=split_check(recipe.loss, recipe.metrics),
        learning_rate=rate_at(getattr(recipe.optimizer, "lr", None), factor, of_callbacks),
        sentinel=build_sentinel(mesh, state_spec(sync), sync.fetch, sync.stow),
        fns=fns,
        sync=sync,
    )


def _trainable(plan: StepPlan) -> tuple[str, ...]:
    """Patterns of the parameters that are trained; (): all."""
    return (*ADAPTERS, *plan.trainable) if plan.lora.rank else plan.trainable


def _is_frozen(groups: list[OptimizerGroup], plan: StepPlan) -> Callable[[str], bool] | None:
    """Whether a parameter, by its name, takes no gradient: by the optimizer's groups, or the plan."""
    by_group, patterns = is_frozen(groups), _trainable(plan)
    if not patterns:
        return by_group
    return lambda name: not matches(name, patterns) or bool(by_group and by_group(name))


def _strategy(
    plan: StepPlan,
    groups: list[OptimizerGroup],
    shapes: Callable[[], PyTree],
    guarded: Callable[[Sync], Sync],
) -> Sync:
    """The plan's strategy, only for the parameters that are trained. shapes: of all parameters."""

    def make(optimizer: optax.GradientTransformation, shapes: Callable[[], PyTree]) -> Sync:
        return build_sync(plan.comm, optimizer, plan.comm_options, plan.max_grad_norm, shapes)

    patterns = _trainable(plan)
    if not patterns:
        return guarded(build_grouped(groups, make, shapes))
    whole = shapes()
    chosen = trained(whole, patterns)
    mine, rest = part_of(whole, chosen), part_of(whole, chosen, False)
    sync = build_grouped(groups, make, lambda: mine)
    still = build_sync(plan.comm, optax.identity(), plan.comm_options, None, lambda: rest)
    return for_part(guarded(sync), still, chosen)
