"""Compiled programs that equal trainers share: most trainers in the tests differ only in their data.

Normally each trainer traces, lowers and compiles its own steps. Here a second trainer with equal model, loss,
optimizer, metrics, averages, plan and devices reuses the functions of the first. A trainer with other
callbacks that are part of its step, or with parts that cannot be compared, has its own functions.
"""

from collections.abc import Hashable
from typing import Any
from unittest import mock

import jax
from flax import linen
from jax.sharding import Mesh

from cyxjax.core.losses import UserLoss
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.models.sequential import SequentialModel
from cyxjax.train import program, run_state
from cyxjax.train.hooks.all_callbacks import in_the_step
from cyxjax.train.hooks.callbacks import EMA
from cyxjax.train.program import Program, Recipe, build_program
from cyxjax.train.settings import StepPlan

PLAIN = Metrics()  # loss and accuracy
_BUILT: dict[Hashable, Program] = {}


class Known(ModelFns):
    """Functions of a model that is equal to any other model with the same key."""

    key: Hashable = None


def share() -> None:
    """From now on, trainers of this process share programs."""
    for room, name, ours in ((program, "adapt", known), (run_state, "build_program", build)):
        mock.patch.object(room, name, ours).start()  # an error where there is no such name


def known(model: Any) -> ModelFns:
    """`adapt`, with the model as key if it is hashable."""
    fns = Known(*adapt(model))
    if isinstance(model, linen.Module) and model.scope is None:
        fns.key = model
    elif type(model) is SequentialModel:
        fns.key = model.layers
    return fns


def build(recipe: Recipe, plan: StepPlan, mesh: Mesh, *, inputs: Any) -> Program:
    """`build_program`, once for equal arguments."""
    key = _key(recipe, plan, mesh, inputs)
    if key is None:
        return build_program(recipe, plan, mesh, inputs=inputs)
    if key not in _BUILT:
        _BUILT[key] = build_program(recipe, plan, mesh, inputs=inputs)
    found = _BUILT[key]
    if isinstance(key[0], tuple):  # it may hold its own values
        return found._replace(fns=found.fns._replace(init=recipe.fns.init))
    return found


def _key(recipe: Recipe, plan: StepPlan, mesh: Mesh, inputs: Any) -> tuple[Hashable, ...] | None:
    """The key by which two calls of `build_program` are compared; None if a part cannot be compared."""
    model, loss, rule, metrics = (
        getattr(recipe.fns, "key", None),
        recipe.loss,
        recipe.optimizer,
        recipe.metrics,
    )
    function = loss.fn if isinstance(loss, UserLoss) else getattr(loss, "__self__", None)
    averages = in_the_step(recipe.callbacks)
    plain = metrics.labels is PLAIN.labels and all(type(one) is EMA for one in averages)
    measured = (metrics.ignore_index, metrics.num_rows, *metrics.own.items(), *metrics.better.items())
    changed = plan.lora.rank or plan.trainable or plan.precision != "float32"
    if None in (model, function) or not plain or (isinstance(model, tuple) and changed):
        return None
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), inputs)
    made = getattr(rule, "made_with", None)
    optimizer = (repr(made), rule.lr) if made else (rule.init, rule.update) if rule else None
    texts = [repr(part) for part in (plan, shapes, made, [vars(one) for one in averages])]
    key = (model, function, optimizer, recipe.augment, measured, mesh, *texts)
    try:
        hash(key)
    except TypeError:  # a model with a list among its fields
        return None
    return None if any("0x" in part for part in texts) else key
