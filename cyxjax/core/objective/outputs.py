"""What a model may return: arrays with the samples in dimension 0, and numbers made of parameters alone."""

from typing import Any

import jax

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.model.sown import of_inputs
from cyxjax.core.trees import named_leaves
from cyxjax.errors import DataError

PyTree = Any


def refuse_of_batch(fns: ModelFns, output: PyTree, inputs: PyTree) -> None:
    """Returns where the numbers of `output` that belong to no sample hang on no sample either.

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
