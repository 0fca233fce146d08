"""Checks from shapes that samples, model, loss and metrics match, and that a step has what a loss over the
global batch and a batch norm need; nothing is compiled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.mesh import REPLICATED, local_replicas, num_replicas
from cyxjax.core.model.batch_stats import needs_full_batches
from cyxjax.core.model.outputs import check_samples_first
from cyxjax.core.objective.global_loss import of_one_device, sees_whole_batch
from cyxjax.core.objective.split_check import split_check
from cyxjax.core.objective.task import takes_labels
from cyxjax.core.objective.terms import shares_of
from cyxjax.core.rows import whole_batch
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree, batch_shapes, kind_of
from cyxjax.data.labels import LabelCheck
from cyxjax.errors import ConfigError, CyxjaxError, DataError, translated
from cyxjax.train.feeding.fit_data import FitData, is_loader, one_sample, stated_batch_size, unsplit
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program, Recipe
from cyxjax.train.settings import BatchShape
from cyxjax.train.start.dispatch import has_whole_batch

Sample = tuple[PyTree, PyTree]
_LONGEST = 160  # characters of another library's message
_WAY = "HINT: put the batch dimension first in its input, or set drop_last=True."


def shapes_of(plan: Plan, program: Program, state: TrainState, inputs: PyTree, targets: PyTree) -> Sample:
    """The shapes of (outputs, targets) for a batch of the plan; nothing is computed.

    Raises: DataError for samples that the loss does not take; ConfigError for a loss or a metric that cannot
        be called on one sample if a step has a part of the batch; otherwise what the model raises.
    """
    loss, metrics, step, mesh = plan.recipe.loss, plan.recipe.metrics, plan.settings.step, plan.group.mesh
    replicas, rows, is_whole = num_replicas(mesh), step.batch.batch_size, has_whole_batch(step, mesh)
    with translated(), whole_batch(is_whole):
        whole = jax.eval_shape(program.consensus, state)
        output = jax.eval_shape(program.predict_step, whole, batch_shapes(inputs, replicas))
    check_samples_first(output, 1, replicas)
    output, target = batch_shapes(output, rows), batch_shapes(targets, rows)
    weight = jax.ShapeDtypeStruct((rows,), jnp.float32)
    try:
        with whole_batch(is_whole):
            jax.eval_shape(partial(shares_of, of_one_device(loss)), output, target, weight)
    except (TypeError, ValueError) as err:
        if isinstance(err, CyxjaxError):
            raise
        given = [", ".join(kind_of(leaf) for leaf in jax.tree.leaves(tree)) for tree in (output, target)]
        text = " ".join(str(err).split())[:_LONGEST]
        raise DataError(
            f"the loss does not take the model's output, {given[0]}, with the target, {given[1]}: "
            f"{type(err).__name__}: {text} HINT: it is called as loss(output, target) on arrays of these "
            "shapes; labels (N, 1) are y[:, 0]."
        ) from err
    metrics.check_merges()
    with whole_batch(is_whole):
        jax.eval_shape(partial(metrics.sums, []), output, target, weight)
    check = split_check(loss, metrics)
    if check.measures and not is_whole:
        jax.eval_shape(check.rows, output, target)
    return output, target


def check_batches(data: FitData, plan: Plan, program: Program, state: TrainState) -> None:
    """Checks the loss, and shapes and labels of the data, before anything is compiled or written.

    Raises: DataError naming a label of no class; otherwise as `shapes_of`.
    """
    parts = {"training data": data, "validation data": None if data.val is None else unsplit(data.val)}
    form: PyTree = None
    looked: Sample = None, None
    for (what, part), labels in zip(parts.items(), plan.labels, strict=True):
        if part is not None:
            before, form = form, batch_shapes(one_sample(part), 1)
            if form != before:
                try:
                    looked = shapes_of(plan, program, state, *one_sample(part))
                except Exception as err:
                    if before is None:  # the training data
                        raise
                    raise _validation_error(before, form, err) from err
            expect_labels(labels, part.train, looked, plan.recipe, what)


def _validation_error(trained: PyTree, form: PyTree, err: Exception) -> DataError:
    kinds = [", ".join(kind_of(leaf) for leaf in jax.tree.leaves(tree)) for tree in (form, trained)]
    text = " ".join(str(err).partition("HINT:")[0].split())[:_LONGEST]
    return DataError(
        "validation data differ from the training data: one sample (inputs, targets) as a batch is "
        f"{kinds[0]}, in training {kinds[1]}: {type(err).__name__}: {text} "
        "HINT: prepare the validation data in the same way as the training data."
    )


def expect_labels(check: LabelCheck, data: Any, looked: Sample, recipe: Recipe, what: str) -> None:
    """Sets up the `check` of the labels of `data`, if there are any: integer targets are labels only for our
    own classification losses. Labels that a task computes from the targets are not checked.

    Raises: DataError naming a label of no class, of arrays.
    """
    if not takes_labels(recipe.loss):
        return
    places: list[int] = []  # of the labels among the leaves of the targets

    def labels_of(output: PyTree, targets: PyTree) -> Sample:
        logits, labels = recipe.metrics.labels(output, targets)
        places.extend(i for i, leaf in enumerate(jax.tree.leaves(targets)) if leaf is labels)
        return logits, labels

    output, labels = jax.eval_shape(labels_of, *looked)
    if not places or not hasattr(output, "shape") or np.dtype(labels.dtype).kind not in "iu":
        return
    if len(labels.shape) == len(output.shape) - 1:
        classes, ignored = output.shape[-1], recipe.metrics.ignore_index
        check.expect(data, lambda targets: jax.tree.leaves(targets)[places[0]], classes, what, ignored)


# ---- what a step must have at once ------------------------------------------------------------------------


def check_whole_batch(data: FitData, plan: Plan, sync: Sync) -> None:
    """Checks that a step has the whole batch in one piece, which a loss over the global batch needs.

    Raises: ConfigError naming what splits the batch, or which data end in a short one.
    """
    loss, step = plan.recipe.loss, plan.settings.step
    cuts = {
        "reproducibility='exact'": step.is_exact,
        f"gradient_accumulation_steps={step.batch.accumulation}": step.batch.accumulation > 1,
        f"comm={step.comm!r}": sync.params_spec != REPLICATED and not sync.keeps_parts,
    }
    for what, is_cut in cuts.items():
        if is_cut:
            raise ConfigError(
                f"{what} computes the parts of a batch apart, but the loss compares samples of all parts. "
                "HINT: leave it out; remat='full' saves memory."
            )
    if _may_be_padded(plan):
        check_full_batches(loss, data.train, step.batch, "training data")
    if data.val is not None:
        check_full_batches(loss, data.val, step.batch, "validation data")


def _may_be_padded(plan: Plan) -> bool:
    """Whether a step of the plan may have padding."""
    reading, local = plan.settings.reading, len(local_replicas(plan.group.mesh))
    if reading.epoch is not None:
        return not reading.drop_last and reading.epoch.num_samples % reading.epoch.global_batch_size != 0
    assert plan.data.reader is not None
    stated, accumulation = stated_batch_size(plan.data.train) or 0, plan.settings.step.batch.accumulation
    # A loader that does not state its batch size may give larger batches than the first.
    is_even = stated % local == 0 and plan.data.reader.first.total == stated * accumulation
    return not reading.drop_last or (local * accumulation > 1 and not is_even)


def check_full_batches(loss: Any, data: Any, batch: BatchShape, what: str) -> None:
    """Raises: ConfigError if `data` end in a short batch and the loss has no argument for its padding."""
    if not sees_whole_batch(loss) or loss.takes_padding:
        return
    size = batch.batch_size * batch.num_shares
    if is_loader(data):
        short = "come from a loader, whose last batch may be short"
    elif len(data) % size:
        short = f"end in a short batch: {len(data)} samples in batches of {size}"
    else:
        return
    raise ConfigError(
        f"the {what} {short}, and the loss takes no weight that separates padding from samples. "
        "HINT: give it a third argument, fn(output, target, weight): 1 for a sample, 0 for padding."
    )


def check_norms(plan: Plan) -> list[str]:
    """Warnings for batch norms that cannot exclude padding, where batches may be padded.

    Raises: ConfigError with the shape of a norm's input.
    """
    fns, inputs = plan.recipe.fns, plan.inputs
    epoch, rows = plan.settings.reading.epoch, plan.settings.step.batch.batch_size
    if not _may_be_padded(plan):
        return []
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), inputs)
    key = jax.random.key(0)
    params, model_state = jax.eval_shape(fns.init, key, inputs)
    what = needs_full_batches(fns, params, model_state, batch, key)
    if not what:
        return []
    if epoch is None:
        return [f"{what[0].upper()}{what[1:]}: a short batch of the loader would give NaN. {_WAY}"]
    short = f"{epoch.num_samples} samples in batches of {epoch.global_batch_size} end in a short one"
    raise ConfigError(f"{what}: {short}, whose padding would count in its statistics. {_WAY}")
