"""Finds the first value of a step that is not finite, from the samples to the gradients, and its layer."""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from cyxjax.core import phases
from cyxjax.core.draws import micro_batch_key, place_in_step, step_key
from cyxjax.core.exact.step import PartsBatch
from cyxjax.core.losses import PerExample
from cyxjax.core.mesh import local_rows
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.augment import with_augment
from cyxjax.core.model.lora import with_lora
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.objective.global_loss import of_one_device
from cyxjax.core.precision import parse_policy, with_policy
from cyxjax.core.step import Batch, TrainState
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.train.settings import StepPlan
from cyxjax.train.trainer import DistributedTrainer

_MOST = 5  # samples or leaves named in one line
_HERE = Path(__file__).parent
# Code whose lines are never the cause; our own models count as the user's.
_NOT_THEIRS = (
    *(str(Path(str(m.__file__)).parent) for m in (jax, flax)),
    str(_HERE),
    str(_HERE.parents[1] / "core"),
)


def inspect_step(
    trainer: DistributedTrainer,
    plan: StepPlan,
    before: Callable[[int], TrainState],
    batch: Batch | PartsBatch,
    ids: np.ndarray,
) -> Iterator[str]:
    """Yields lines that name what was not finite, the first cause first.

    before: replica -> its state before the step, with whole parameters; batch: the global batch of the step;
    ids: the samples of the step, in the order of places.
    """
    fns = with_lora(with_policy(adapt(trainer.get_model()), parse_policy(plan.precision)), plan.lora)
    fns = with_augment(fns, trainer.recipe.augment)
    for n, part in enumerate(_parts(batch, plan.batch.accumulation, before(0), ids)):
        if not len(part[-1]):
            continue  # no sample of a short batch
        state = before(n // plan.batch.accumulation)
        if broken := nonfinite_names(state.params):
            yield f"Before the step these parameters were not finite: {first_few(broken)}."
            return
        lines = list(_inspect_part(fns, trainer.recipe.loss, trainer.get_model(), state, part))
        if lines:
            yield from lines
            return
    yield "Each replica's forward and backward pass is finite on its own: the sum over replicas overflows."


def _parts(
    batch: Batch | PartsBatch, accumulation: int, before: TrainState, ids: np.ndarray
) -> Iterator[tuple[str, PyTree, PyTree, Any, Any, np.ndarray]]:
    """(name, inputs, targets, weight, key, sample ids) of each replica's micro-batches."""
    inputs, targets, weight, replicas = _rows(batch)
    rows = len(weight) // (replicas * accumulation)
    key = step_key(jnp.asarray(before.key), before.step)
    shape = {"rows": rows, "num_replicas": replicas}
    for r in range(replicas):
        for m in range(accumulation):
            start = (r * accumulation + m) * rows
            cut = slice(start, start + rows)
            places = place_in_step(np.arange(rows), m, r, **shape)
            own = ids[places[places < len(ids)]]
            draws = micro_batch_key(key, m, r, **shape)
            parts = jax.tree.map(lambda a, c=cut: a[c], (inputs, targets, weight))
            yield f"replica {r}, micro-batch {m}", *parts, draws, own


def _rows(batch: Batch | PartsBatch) -> tuple[PyTree, PyTree, np.ndarray, int]:
    """(inputs, targets, weight, number of shares): all rows of a step, share after share, in one process."""
    if isinstance(batch, PartsBatch):
        whole = jax.tree.map(lambda *rows: np.concatenate(rows), *batch.parts)
        return *jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tuple(whole[1:])), len(whole.number)
    return *jax.tree.map(_host, batch[:3]), len(batch.signal)


def _inspect_part(
    fns: ModelFns, loss: PerExample, model: Any, before: TrainState, part: tuple
) -> Iterator[str]:
    name, inputs, targets, weight, draws, ids = part
    broken = ids[~_finite_rows(inputs, len(ids)) | ~_finite_rows(targets, len(ids))]
    if len(broken):
        yield f"The data is not finite: samples {first_few(broken.tolist())}."
        return
    run = lambda p: fns.apply(p, before.model_state, inputs, draws, True)  # noqa: E731
    found = first_nonfinite(model, lambda: run(before.params))
    yield from (f"First not finite ({name}, forward): {one}." for one in found)
    if found:
        return
    output, pullback, _ = phases.forward(fns, before.params, before.model_state, inputs, weight, draws)
    scale = jnp.float32(1)
    losses, pulled = phases.pull_back(of_one_device(loss), output, pullback, targets, weight, scale)
    bad = ids[~np.isfinite(np.sum([one.values for one in losses], axis=0))[: len(ids)]]
    if len(bad):
        yield f"The layers are finite, the loss is not ({name}): samples {first_few(bad.tolist())}."
        return
    broken = list(dict.fromkeys(name for one in pulled for name in nonfinite_names(one.grads)))
    if broken:
        yield f"Output and loss are finite, gradients are not ({name}, backward): {first_few(broken)}."


def _host(leaf: Any) -> np.ndarray:
    return local_rows(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _finite_rows(tree: PyTree, rows: int) -> np.ndarray:
    """bool (rows,): whether all numbers of a sample are finite."""
    good = np.ones(rows, bool)
    for leaf in jax.tree.leaves(tree):
        if np.issubdtype(leaf.dtype, np.floating):
            good &= np.isfinite(leaf[:rows]).reshape(rows, -1).all(axis=1)
    return good


def nonfinite_names(tree: PyTree) -> list[str]:
    """Names of the leaves that are not finite."""
    return [name for name, leaf in named_leaves(tree) if not np.isfinite(np.asarray(leaf, np.float32)).all()]


def first_few(names: list[Any]) -> str:
    shown = ", ".join(map(str, names[:_MOST]))
    return f"{shown} and {len(names) - _MOST} more" if len(names) > _MOST else shown


# ---- the layer -----------------------------------------------------------------------------------------


def first_nonfinite(model: Any, run: Callable[[], Any]) -> list[str]:
    """The first operation of `run` (eager) that gives a NaN, and the first that gives an infinity: the layer,
    the operation, and the line of code; [] if all is finite.

    Both are named: an infinity is often the cause of the NaN, but attention masks are infinite on purpose.
    """
    found = (_first(model, run, checked) for checked in (jax.debug_nans, jax.debug_infs))
    return [one for one in found if one is not None]


def _first(model: Any, run: Callable[[], Any], checked: Callable[[bool], Any]) -> str | None:
    try:
        with checked(True):
            jax.block_until_ready(run())
    except FloatingPointError as error:
        what = str(error).strip().splitlines()[0].rstrip(".")
        return f"{_layer_of(model, error)}: {what}{_line_of(error)}"
    return None


def _layer_of(model: Any, error: BaseException) -> str:
    """The innermost layer whose method was running."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers: list[Any] = [one for one in owners if isinstance(one, linen.Module | nnx.Module)]
    if not layers:
        return "the model" if isinstance(model, tuple) else type(model).__name__
    root, layer = layers[0], layers[-1]
    if isinstance(layer, linen.Module):
        path: Any = layer.path
    else:
        path = next((path for path, part in nnx.iter_modules(root) if part is layer), ())
    name = "/".join(map(str, path))
    return f"layer {name} ({type(layer).__name__})" if name else f"{type(layer).__name__} itself"


def _line_of(error: BaseException) -> str:
    """`, at` the innermost line of model code; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if not f.filename.startswith(_NOT_THEIRS)]
    return f", at {user[-1].filename}:{user[-1].lineno} ({user[-1].name})" if user else ""
