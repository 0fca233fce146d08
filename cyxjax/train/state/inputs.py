"""Whether samples are such as a trainer's parameters were made for."""

from collections.abc import Callable
from typing import Any

from cyxjax.core.trees import batch_shapes
from cyxjax.errors import CyxjaxError, DataError
from cyxjax.train.feeding.taken import described

PyTree = Any


def refuse_other_inputs(known: PyTree, given: PyTree, run: Callable[[PyTree], Any], replicas: int) -> None:
    """Returns where the model takes `given` with the parameters it has: other lengths may do.

    known, given: one sample's inputs, (1, ...). run: traces the model on shapes, a sample for each replica.
    Raises: DataError with both shapes, where else the model's library would speak of its kernels.
    """
    if described(known) == described(given):
        return
    try:
        run(batch_shapes(given, replicas))
    except CyxjaxError:
        raise
    except Exception as err:  # whatever a model raises
        text = " ".join(str(err).split())[:160]
        raise DataError(
            f"the samples are {described(given)}, and the trainer's parameters were made for "
            f"{described(known)}: the model does not take them ({type(err).__name__}: {text}). HINT: prepare "
            "them as before, or begin with a new trainer."
        ) from err
