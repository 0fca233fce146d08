"""Whether samples are such as a trainer's parameters were made for."""

from collections.abc import Callable
from typing import Any

from cyxjax.core.trees import batch_shapes
from cyxjax.distributed.known_inputs import described, other_inputs
from cyxjax.errors import CyxjaxError

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
        made = (described(given), described(known), "the trainer's", "begin with a new trainer")
        raise other_inputs(err, *made) from err
