"""Whether samples are such as a trainer's parameters were made for."""

from collections.abc import Callable
from typing import Any

from cyxjax.core.trees import batch_shapes, named_leaves
from cyxjax.errors import CyxjaxError, DataError

PyTree = Any


def refuse_other_inputs(known: PyTree, given: PyTree, run: Callable[[PyTree], Any], replicas: int) -> None:
    """Returns where the model takes `given` with the parameters it has: other lengths may do.

    known, given: one sample's inputs, (1, ...). run: traces the model on shapes, a sample for each replica.
    Raises: DataError with both shapes, where else the model's library would speak of its kernels.
    """
    if _said(known) == _said(given):
        return
    try:
        run(batch_shapes(given, replicas))
    except CyxjaxError:
        raise
    except Exception as err:  # whatever a model raises
        text = " ".join(str(err).split())[:160]
        raise DataError(
            f"the samples are {_said(given)}, and the trainer's parameters were made for {_said(known)}: the "
            f"model does not take them ({type(err).__name__}: {text}). HINT: prepare them as before, or "
            "begin with a new trainer."
        ) from err


def _said(inputs: PyTree) -> str:
    """Names, dtypes and shapes: "float32[N, 6]"."""
    each = [
        f"{name + ' ' if name else ''}{leaf.dtype}[{', '.join(['N', *map(str, leaf.shape[1:])])}]"
        for name, leaf in named_leaves(inputs)
    ]
    return ", ".join(each)
