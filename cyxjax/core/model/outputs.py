"""What a model may return: arrays with samples first, and losses of its own that it sows.

One sown value per sample is added to the sample's loss. One number for the whole batch is refused: for
example, the balance of experts over a batch differs for each share of it. A scalar in the output is allowed
only if it depends on the parameters alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.rows import mean_of_each
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.errors import DataError


def holds_losses(collection: str) -> bool:
    """Whether the last word is `loss` or `losses`: so for `aux_loss`, not for `loss_stats`, `glossary`."""
    return collection.split("_")[-1] in ("loss", "losses")


def sum_of_sown(losses: Sequence[tuple[str, jax.Array]], inputs: PyTree) -> jax.Array:
    """float32 (B,): the sum of all losses that a model sowed; each is given with its collection's name.

    Raises: DataError for a loss that is not one value per sample.
    """
    rows = jax.tree.leaves(inputs)[0].shape[0]
    total = jnp.zeros(rows, jnp.float32)
    for name, leaf in losses:
        if leaf.shape[:1] != (rows,):
            raise DataError(
                f"the model sows a loss of shape {leaf.shape} into {name!r}; expected ({rows},): one value "
                "per sample, so that padding has zero weight. HINT: sow a value per sample, not the mean; "
                "for a penalty on parameters sow jnp.full(len(x), penalty)."
            )
        total = total + mean_of_each(leaf)
    return total


def of_inputs(run: Callable, given: PyTree, other: PyTree) -> list[bool]:
    """For each leaf of `run(given, other)`, whether it depends on `given`. Nothing is computed."""
    jaxpr, marked = jax.make_jaxpr(run)(given, other).jaxpr, len(jax.tree.leaves(given))
    return _reached(jaxpr, [i < marked for i in range(len(jaxpr.invars))])


def _reached(jaxpr: Any, marked: Sequence[bool]) -> list[bool]:
    """For each output of `jaxpr`, whether it depends on an input that is marked."""
    reached = {v for v, is_marked in zip(jaxpr.invars, marked, strict=True) if is_marked}

    def is_reached(v: Any) -> bool:
        return not isinstance(v, Literal) and v in reached

    for eqn in jaxpr.eqns:
        into = [is_reached(v) for v in eqn.invars]
        out = [any(into)] * len(eqn.outvars)
        if eqn.primitive.name in ("jit", "remat2"):  # jax.checkpoint
            inner = eqn.params["jaxpr"]
            out = _reached(getattr(inner, "jaxpr", inner), into)
        reached.update(v for v, is_out in zip(eqn.outvars, out, strict=True) if is_out)
    return [is_reached(v) for v in jaxpr.outvars]


def refuse_of_batch(fns: ModelFns, output: PyTree, inputs: PyTree) -> None:
    """Checks that scalars in `output` do not depend on the samples.

    output: shapes. inputs: of any number of samples. Nothing is computed.
    Raises: DataError naming a scalar that does: it would differ for each share of the batch.
    """
    if all(leaf.shape for leaf in jax.tree.leaves(output)):
        return
    values = jax.eval_shape(fns.init, jax.random.key(0), inputs)

    def run(given: PyTree, values: PyTree) -> PyTree:
        (inputs, key), (params, model_state) = given, values
        return fns.apply(params, model_state, inputs, key, False)[0]

    made = of_inputs(run, (inputs, jax.random.key(0)), values)
    for (name, leaf), is_of_batch in zip(named_leaves(output), made, strict=True):
        if not leaf.shape and is_of_batch:
            raise DataError(
                f"the model's output{f' {name!r}' if name else ''} is one number that depends on all samples "
                "of a batch, which is split over replicas and padded. HINT: return one value per sample, "
                'shape (B,), or {"loss": values} from a model that computes its own loss.'
            )


def check_samples_first(output: PyTree, rows: int, replicas: int = 1) -> None:
    """Checks that each array of `output`, which may be shapes, has `rows` samples in dimension 0.

    replicas: how many replicas' rows are concatenated. Raises: DataError naming an array that does not.
    """
    for name, leaf in named_leaves(output):
        if leaf.ndim and leaf.shape[0] != rows * replicas:
            shape = (leaf.shape[0] // replicas, *leaf.shape[1:])
            raise DataError(
                f"the model's output{f' {name!r}' if name else ''} has shape {shape} for {rows} samples; "
                f"dimension 0 must be the samples, ({rows}, ...). HINT: move them there, e.g. with "
                "jnp.swapaxes(y, 0, 1) at the end of the model."
            )
