"""Compiled programs that equal trainers share: most trainers in the tests differ only in their data.

Normally each trainer traces, lowers and compiles its own steps. Here a second trainer with equal model, loss,
optimizer, metrics, averages, plan and devices reuses the functions of the first. A trainer with other
callbacks that are part of its step or its evaluation, or with parts that cannot be compared, has its own.
Wrapped models share what `core/facade.py` builds from equal modules of linen, or the same hook and optimizer.
"""

from collections.abc import Callable, Hashable
from functools import cache, partial, wraps
from typing import Any
from unittest import mock

import jax
import optax
from flax import linen
from jax.sharding import Mesh

from cyxjax.config.sections import OPTAX, OPTIMIZERS, OptimizerConfig
from cyxjax.core import facade
from cyxjax.core.losses import UserLoss
from cyxjax.core.metrics import Metrics
from cyxjax.core.model import linen_models
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.global_loss import GlobalLoss
from cyxjax.core.optimizer import refuse_unless_elementwise
from cyxjax.core.step import TrainState
from cyxjax.core.trees import batch_shapes
from cyxjax.distributed import comm_hooks, ddp_state
from cyxjax.models.sequential import SequentialModel
from cyxjax.sync import registry
from cyxjax.train import program, run_state
from cyxjax.train.checks import batch_checks
from cyxjax.train.hooks.callbacks import EMA, Callback, ReduceLROnPlateau
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program, Recipe, build_program
from cyxjax.train.settings import StepPlan
from cyxjax.train.start import at_once, memory_plan, named
from cyxjax.train.start.optimizers import Optimizer, build_optimizer

PLAIN = Metrics()  # loss and accuracy
_BUILT: dict[Hashable, Program] = {}
_SHARED: set[Any] = set()  # the functions `predict_step` of these programs
_ELEMENTWISE: set[Hashable] = set()  # rules that were checked for `zero1` and `fsdp`
_equal_rule: tuple[Hashable, ...] | None = None  # what the rule is made of while a program is built


class Known(ModelFns):
    """Functions of a model that is equal to any other model with the same key."""

    key: Hashable = None


def share() -> None:
    """From now on, trainers of this process share programs."""
    replaced: list[tuple[Any, str, Any]] = [
        (program, "adapt", known),
        (run_state, "build_program", build),
        (named, "build_optimizer", rule_of),
        (batch_checks, "shapes_of", once(batch_checks.shapes_of)),
        (at_once, "_most_at_once", once(at_once._most_at_once)),
        (registry, "refuse_unless_elementwise", check),
        (memory_plan, "build_program", with_known_rule),
    ]
    builders: dict[Any, list[str]] = {
        facade: [f"build_{name}" for name in ("forward", "infer", "backward", "update", "reduce")],
        ddp_state: ["adapted", "reduce_then"],
        comm_hooks: ["mean_reducer"],
        linen_models: ["from_linen"],  # a module that holds its own values has no hash
    }
    replaced += [(room, name, kept(getattr(room, name))) for room in builders for name in builders[room]]
    for room, name, ours in replaced:
        mock.patch.object(room, name, ours).start()  # an error where there is no such name


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called once for equal arguments; each time for those that cannot be compared."""
    of_equal = cache(function)

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        try:
            hash((args, *options.items()))
        except TypeError:
            return function(*args, **options)
        return of_equal(*args, **options)

    return run


def check(rule: optax.GradientTransformation, shapes: Any, cut: Callable, comm: str) -> None:
    """`refuse_unless_elementwise`, once for equal kinds of leaves and the same rule, or an equal recipe's.

    `comm` is only named in the refusal, which is not kept.
    """
    kinds = {(leaf.ndim, leaf.size == 0, str(leaf.dtype)) for leaf in jax.tree.leaves(shapes)}
    key = _equal_rule or rule, cut, *sorted(kinds)
    if key not in _ELEMENTWISE:
        refuse_unless_elementwise(rule, shapes, cut, comm)
        _ELEMENTWISE.add(key)


def known(model: Any) -> ModelFns:
    """`adapt`, with the model as key if it is hashable."""
    fns = Known(*adapt(model))
    if isinstance(model, linen.Module) and model.scope is None:
        fns.key = model
    elif type(model) is SequentialModel:
        fns.key = model.layers
    return fns


def rule_of(section: OptimizerConfig) -> optax.GradientTransformation:
    """`build_optimizer`; a rule of ours or of optax is equal to any other of the same section."""
    rule = build_optimizer(section)
    if isinstance(rule, Optimizer) and section.name in (*OPTIMIZERS, *OPTAX):
        rule.section = section.model_dump_json()
    return rule


def build(recipe: Recipe, plan: StepPlan, mesh: Mesh, *, inputs: Any) -> Program:
    """`build_program`, with the functions of the first call that had equal arguments."""
    made, key = with_known_rule(recipe, plan, mesh, inputs=inputs), _key(recipe, plan, mesh, inputs)
    if key is None:
        return made
    own = {"learning_rate": made.learning_rate, "metrics": made.metrics}  # they ask callbacks, and directions
    found = _BUILT.setdefault(key, made)._replace(**own)
    _SHARED.add(found.predict_step)
    if isinstance(key[0], tuple):  # it may hold its own values
        return found._replace(fns=found.fns._replace(init=recipe.fns.init))
    return found


def with_known_rule(recipe: Recipe, plan: StepPlan, mesh: Mesh, *, inputs: Any) -> Program:
    """`build_program`, which wraps the optimizer each time; `check` finds what it was made of."""
    with mock.patch(f"{__name__}._equal_rule", _rule_key(recipe, plan)):
        return build_program(recipe, plan, mesh, inputs=inputs)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` (plan, program, state, *samples), called once for equal shapes of a shared program.

    A test that patches what `function` calls gets an earlier result.
    """
    kept: dict[Hashable, Any] = {}

    def run(plan: Plan, program: Program, state: TrainState, *samples: Any) -> Any:
        if program.predict_step not in _SHARED:
            return function(plan, program, state, *samples)
        key = program.predict_step, repr(batch_shapes(samples, 1))
        if key not in kept:
            kept[key] = function(plan, program, state, *samples)
        return kept[key]

    return run


def _key(recipe: Recipe, plan: StepPlan, mesh: Mesh, inputs: Any) -> tuple[Hashable, ...] | None:
    """The key by which two calls of `build_program` are compared; None if a part cannot be compared."""
    model, loss = getattr(recipe.fns, "key", None), recipe.loss
    rule, metrics = _rule_key(recipe, plan), recipe.metrics
    owner = "fn" if isinstance(loss, UserLoss) else "__self__"
    function = loss if isinstance(loss, GlobalLoss) else getattr(loss, owner, None)
    plain = metrics.labels is PLAIN.labels
    own, texts_of_metrics = [], []
    for name, metric in metrics.own.items():
        if type(metric) is partial:
            arguments = (*metric.args, *metric.keywords.values())
            plain &= all(
                isinstance(one, int | float | str) for one in arguments
            )  # not arrays: too long a text
            texts_of_metrics.append((name, metric.args, metric.keywords))
        own.append((name, metric.func if type(metric) is partial else metric))
    measured = (metrics.ignore_index, metrics.num_rows, *own)
    changed = plan.lora.rank or plan.trainable or plan.precision != "float32"
    if None in (model, function, rule) or not plain or (isinstance(model, tuple) and changed):
        return None
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), inputs)
    texts = [repr(part) for part in (plan, shapes, texts_of_metrics)]
    key = (model, function, *rule, recipe.augment, measured, mesh, *texts)
    try:
        hash(key)
    except TypeError:  # a model with a list among its fields
        return None
    return None if any("0x" in part for part in texts) else key


def _rule_key(recipe: Recipe, plan: StepPlan) -> tuple[Hashable, ...] | None:
    """The key by which the optimizers of two programs are compared, with their schedules and averages."""
    rule, parts = recipe.optimizer, [one for one in recipe.callbacks if _is_part(one)]
    added = [vars(one) if type(one) is EMA else "a factor" for one in parts]
    made = getattr(rule, "made_with", {}) | {"section": getattr(rule, "section", "")}
    functions = {name: value for name, value in made.items() if callable(value)}  # a schedule, a mask
    numbers = {name: value for name, value in made.items() if name not in functions}
    is_known = any(made.values())  # by its name and numbers; else a rule is equal to itself only
    optimizer = functions.items() if is_known else (rule.init, rule.update) if rule else ()
    texts = [repr(part) for part in (plan.rate, plan.trainable, plan.lora, numbers, added)]
    if {type(one) for one in parts} - {EMA, ReduceLROnPlateau} or any("0x" in part for part in texts):
        return None
    # Terms of a loss may have optimizers of their own.
    return (*optimizer, getattr(rule, "lr", 0), getattr(recipe.loss, "terms", ()), *texts)


def _is_part(hook: Hook) -> bool:
    """Whether `hook` adds something to the optimizer or its state, or changes what evaluation sees."""
    if not isinstance(hook, Callback):
        return False
    own = type(hook)
    changed = own.around is not Callback.around or own.evaluated is not Callback.evaluated
    return changed or hook.changes_learning_rate
