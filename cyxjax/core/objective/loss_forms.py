"""What a loss may be given, and what it may give: shapes and kinds, in words."""

from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.trees import kind_of
from cyxjax.errors import DataError


def check_form(values: Any, batch: int) -> None:
    """Returns for what a loss of `batch` samples may be: one array, of one value or of a row a sample, or two
    of a row a sample each: values and what they weigh.

    Raises: DataError saying what it is instead.
    """
    if isinstance(values, tuple):
        shapes = [getattr(one, "shape", None) for one in values]
        if len(shapes) == 2 and shapes[0] and shapes[0] == shapes[1] and shapes[0][0] == batch:
            return
        raise DataError(
            f"the loss of {batch} samples gave a tuple of shapes {shapes}, expected (values, weights) of "
            f"one shape, ({batch}, ...). HINT: return the loss alone; what else is to be seen is a metric's."
        )
    if not hasattr(values, "shape"):
        raise DataError(
            f"the loss gave {kind_of(values)}, expected one array: a value a sample, or their mean. "
            "HINT: return the loss alone; what else is to be seen belongs into metrics."
        )
    if values.shape and values.shape[0] != batch:
        raise DataError(
            f"the loss of {batch} samples has shape {values.shape}, expected ({batch},): one value a sample, "
            "so that padding weighs nothing. HINT: end with .reshape(len(target), -1).mean(1), or .mean()."
        )


def refuse_complex(loss: Any, output: jax.Array, target: jax.Array) -> None:
    """Raises: DataError for arrays of which a loss of ours, made real, would take a half."""
    for what, one in (("output", output), ("target", target)):
        if jnp.issubdtype(one.dtype, jnp.complexfloating):
            raise DataError(
                f"{type(loss).__name__}: the {what} is {one.dtype}: it would take the real part alone. "
                "HINT: both parts, jnp.stack([z.real, z.imag], -1), jnp.abs(z), or a loss of your own."
            )


def check_shape(loss: Any, output: jax.Array, target: jax.Array, ok: bool) -> None:
    """Returns where the arrays that a loss of ours compares are real, and fit (`ok`). Raises: DataError."""
    refuse_complex(loss, output, target)
    if not ok:
        raise DataError(
            f"{type(loss).__name__}: output {output.dtype}{list(output.shape)} and target "
            f"{target.dtype}{list(target.shape)} do not fit. HINT: reshape the target (labels are integers "
            "without the class dimension, of (N, 1) y[:, 0], of one-hot rows y.argmax(-1); other targets "
            "have the output's shape)."
        )
