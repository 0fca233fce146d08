"""What a model, a loss and a metric may return, and the errors that name what they return instead."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.model.sown import of_inputs
from cyxjax.core.trees import PyTree, kind_of, named_leaves
from cyxjax.errors import ConfigError, DataError


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


_ASKS = (
    jax.errors.ConcretizationTypeError,  # float(), .item(), and `if` of it
    jax.errors.TracerArrayConversionError,  # numpy, scikit-learn
    jax.errors.TracerIntegerConversionError,
)
_PACKAGE = str(Path(__file__).parents[2])


@contextmanager
def compiled(what: str) -> Iterator[None]:
    """Raises: ConfigError where `what` asks for a number while it is traced."""
    try:
        yield
    except _ASKS as err:
        raise ConfigError(
            f"{what} asks for numbers{_place(err)}, by numpy, float() or `if`; it is compiled, where "
            "there are none yet. HINT: jnp for numpy, jnp.where for `if`; what has no such form "
            "(scikit-learn) is computed from trainer.predict(X)."
        ) from err


def _place(err: Exception) -> str:
    """ " in file.py:12", of the user's own line nearest to the error."""
    own = [
        frame
        for frame in traceback.extract_tb(err.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith(_PACKAGE)
    ]
    own = [frame for frame in own if Path(frame.filename).exists()]
    return f" in {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
