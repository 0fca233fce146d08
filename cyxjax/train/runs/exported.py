"""Checks an exported program before it is renamed into place: its outputs must equal the model's."""

from typing import Any

import jax
import numpy as np

from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError, DataError

PyTree = Any
MOST_BYTES = 1 << 30  # of parameters: constants of the program, a protobuf of 2 GiB at most
_ROUNDING = 1e-6  # what is 0 but for the rounding of float32: a mean of normalised numbers
FIXED = "--to safetensors keeps the parameters."


def refuse_too_large(what: str, num_bytes: int) -> None:
    """Raises: ConfigError for more parameters than a file of one program holds."""
    if num_bytes > MOST_BYTES:
        raise ConfigError(
            f"{num_bytes / 1e9:.1f} GB of parameters; {what} file holds at most {MOST_BYTES / 1e9:.1f}. "
            "HINT: --to safetensors, and the model's own code."
        )


def cannot_be_written(form: str, err: Exception, batch_size: int | None) -> ConfigError:
    """What a model, or what lowers it, raised, in one line."""
    text = " ".join(str(err).split())
    text = text if len(text) < 240 else text[:240] + "..."
    way = "try --batch-size 1: its code may want a number of rows." if batch_size is None else FIXED
    return ConfigError(f"the model cannot be written as {form}: {type(err).__name__}: {text} HINT: {way}")


def rows_of(inputs: PyTree, batch_size: int | None) -> PyTree:
    """`inputs`, repeated or cut to `batch_size` rows; None: as they are."""
    return jax.tree.map(lambda a: np.resize(a, (batch_size or len(a), *a.shape[1:])), inputs)


def refuse_other_outputs(found: PyTree, wanted: PyTree, room: float) -> None:
    """Raises: DataError for a leaf that differs by more than `room`, relative to the largest."""
    for (name, other), one in zip(named_leaves(wanted), jax.tree.leaves(found), strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        noise = room * np.max(np.abs(b), initial=0.0) + _ROUNDING
        if a.shape != b.shape or not np.allclose(a, b, rtol=room, atol=noise):
            raise DataError(
                f"what was exported computes something else (output {name or 'of the model'}). "
                "HINT: --to safetensors; open an issue, with the model."
            )
