"""What a model may return: arrays with samples first, and losses of its own that it sows.

One sown value per sample is added to the sample's loss. One number for the whole batch is refused: for
example, the balance of experts over a batch differs for each share of it. A scalar in the output is allowed
only if it depends on the parameters alone.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

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


def refuse_of_batch(fns: ModelFns, output: PyTree, inputs: PyTree) -> None:
    """Checks that scalars in `output` do not depend on the samples.

    output: shapes. inputs: of any number of samples. Nothing is computed.
    Raises: DataError naming a scalar that does: it would differ for each share of the batch.
    """
    if all(leaf.shape for leaf in jax.tree.leaves(output)):
        return
    values = jax.eval_shape(fns.init, jax.random.key(0), inputs)

    def run(place: int, given: PyTree, values: PyTree) -> jax.Array:
        (inputs, key), (params, model_state) = given, values
        return jax.tree.leaves(fns.apply(params, model_state, inputs, key, False)[0])[place]

    for place, (name, leaf) in enumerate(named_leaves(output)):
        if not leaf.shape and _depends(partial(run, place), (inputs, jax.random.key(0)), values):
            raise DataError(
                f"the model's output{f' {name!r}' if name else ''} is one number that depends on all samples "
                "of a batch, which is split over replicas and padded. HINT: return one value per sample, "
                'shape (B,), or {"loss": values} from a model that computes its own loss.'
            )


def _depends(run: Callable[[PyTree, PyTree], jax.Array], given: PyTree, other: PyTree) -> bool:
    """Whether `run(given, other)` depends on `given`: `jax.vmap` then has no result without a batch axis."""
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), given)
    try:
        jax.eval_shape(jax.vmap(run, in_axes=(0, None), out_axes=None), stacked, other)
    except ValueError:  # the model itself raises none: it has run on these shapes
        return True
    return False


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
