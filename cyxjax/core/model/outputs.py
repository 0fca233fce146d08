"""What a model may give back: samples first in each array, and losses of its own that it sows.

A sown value a sample is added to the sample's loss. One number for a batch is refused: a balance of experts
over the batch is another number for each share of it. In the output a number of parameters alone may stand.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.rows import mean_of_each
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.errors import DataError


def holds_losses(collection: str) -> bool:
    """Whether its last word is `loss` or `losses`: `aux_loss` does, `loss_stats` and `glossary` do not."""
    return collection.split("_")[-1] in ("loss", "losses")


def sum_of_sown(losses: Sequence[tuple[str, jax.Array]], inputs: PyTree) -> jax.Array:
    """float32 (B,): all losses a model sowed, by the name of where.

    Raises: DataError for one that is no value a sample.
    """
    rows = jax.tree.leaves(inputs)[0].shape[0]
    total = jnp.zeros(rows, jnp.float32)
    for name, leaf in losses:
        if leaf.shape[:1] != (rows,):
            raise DataError(
                f"the model sows a loss of shape {leaf.shape} into {name!r}; expected ({rows},): one value a "
                "sample, so that padding weighs nothing. HINT: sow the value of each sample, not their mean; "
                "of a penalty of weights jnp.full(len(x), penalty)."
            )
        total = total + mean_of_each(leaf)
    return total


def of_inputs(run: Callable, given: PyTree, other: PyTree) -> list[bool]:
    """By leaf of `run(given, other)`, whether it is made from `given`. Nothing is computed."""
    closed = jax.make_jaxpr(run)(given, other)
    reached = set(closed.jaxpr.invars[: len(jax.tree.leaves(given))])
    for eqn in closed.jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in reached for v in closed.jaxpr.outvars]


def refuse_of_batch(fns: ModelFns, output: PyTree, inputs: PyTree) -> None:
    """Checks that numbers in `output` without a batch dimension do not depend on the samples.

    output: shapes. inputs: any number of samples'. Nothing is computed.
    Raises: DataError naming one that does: each share of the batch, and its padding, has another.
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
                f"the model's output{f' {name!r}' if name else ''} is one number, made from all samples of a "
                "batch, which is split over replicas and padded. HINT: return one value per sample, shape "
                '(B,), or {"loss": these} from a model that computes its own loss.'
            )


def check_samples_first(output: PyTree, rows: int, replicas: int = 1) -> None:
    """Returns where each array of `output`, which may be shapes, has `rows` samples in dimension 0.

    replicas: how many replicas' arrays stand one after the other. Raises: DataError naming one that has not.
    """
    for name, leaf in named_leaves(output):
        if leaf.ndim and leaf.shape[0] != rows * replicas:
            shape = (leaf.shape[0] // replicas, *leaf.shape[1:])
            raise DataError(
                f"the model's output {name or '(the output)'} has shape {shape} for {rows} samples: "
                f"dimension 0 of the output must be the samples, ({rows}, ...). HINT: move them there, e.g. "
                "jnp.swapaxes(y, 0, 1) at the end of the model."
            )
