"""What only shows when a program is made for its backend, found before a run writes anything."""

from typing import Any

import jax

from cyxjax.core import precision
from cyxjax.core.step import TrainState
from cyxjax.train.build import Built

PyTree = Any


def check_precision(built: Built, state: TrainState, inputs: PyTree, text: str, replicas: int) -> None:
    """The model in precision `text` asks for nothing that the backend lacks; `inputs` are of one sample.

    Nothing is compiled. Only float16 is looked at: of the precisions it alone is half supported on some
    backends, and other runs need not wait for the program to be made twice.
    Raises: ConfigError that names the precision and the backend.
    """
    if not precision.parse_policy(text).needs_loss_scale:
        return
    each = jax.tree.map(lambda a: jax.ShapeDtypeStruct((replicas, *a.shape[1:]), a.dtype), inputs)
    with precision.explained(text, jax.default_backend()):
        jax.jit(built.predict_step).lower(jax.eval_shape(built.program.consensus, state), each)
