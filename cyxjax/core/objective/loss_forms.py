"""What a loss may be given, and what it may give: shapes and kinds, in words."""

from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.trees import kind_of
from cyxjax.errors import DataError


def check_form(values: Any, batch: int, what: str = "the loss") -> None:
    """Returns for what a loss or metric of `batch` samples may be: one array, of one number or of a row per
    sample, or two of a row per sample each: values and their weights.

    what: names it. Raises: DataError saying what it is instead.
    """
    if isinstance(values, tuple):
        shapes = [getattr(one, "shape", None) for one in values]
        if len(shapes) == 2 and shapes[0] and shapes[0] == shapes[1] and shapes[0][0] == batch:
            return
        raise DataError(
            f"{what} of {batch} samples gave a tuple of shapes {shapes}, expected (values, weights) of "
            f"one shape, ({batch}, ...). HINT: return the values alone; cx.Metrics measures other things."
        )
    if not hasattr(values, "shape"):
        raise DataError(
            f"{what} gave {kind_of(values)}, expected one array: a value per sample, or their mean. "
            "HINT: return the values alone; cx.Metrics measures other things."
        )
    if values.shape and values.shape[0] != batch:
        raise DataError(
            f"{what} of {batch} samples has shape {values.shape}, expected ({batch},): one value per sample. "
            "HINT: end with .reshape(len(target), -1).mean(1), or .mean()."
        )
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise DataError(f"{what} is complex, expected real numbers. HINT: jnp.abs(z) ** 2, or z.real.")


def check_arrays(loss: Any, output: jax.Array, target: jax.Array) -> None:
    """Raises: DataError unless output and target are arrays of real numbers, as a loss of ours takes them."""
    for what, one in (("output", output), ("target", target)):
        if not hasattr(one, "dtype"):
            raise DataError(
                f"{type(loss).__name__} takes one array, and the {what} is {kind_of(one)}. HINT: "
                f"cx.Task(loss, {what}=...) picks a part; loss=None (in a file `loss: model`) "
                "is a model's own loss."
            )
        if jnp.issubdtype(one.dtype, jnp.complexfloating):
            raise DataError(
                f"{type(loss).__name__}: the {what} is {one.dtype}: it would take the real part alone. "
                "HINT: both parts, jnp.stack([z.real, z.imag], -1), jnp.abs(z), or a loss of your own."
            )


def check_shape(loss: Any, output: jax.Array, target: jax.Array, ok: bool) -> None:
    """Returns where the arrays that a loss of ours compares fit (`ok`). Raises: DataError."""
    if not ok:
        raise DataError(
            f"{type(loss).__name__}: output {output.dtype}{list(output.shape)} and target "
            f"{target.dtype}{list(target.shape)} do not fit. HINT: labels are integers without the class "
            "dimension (of (N, 1) y[:, 0], of one-hot rows y.argmax(-1)); other targets have the output's "
            "shape (y[:, None] for outputs (N, 1))."
        )
