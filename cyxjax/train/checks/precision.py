"""Whether the backend has what the precision asks for."""

from typing import Any

import jax

from cyxjax.core.step import TrainState
from cyxjax.core.trees import batch_shapes
from cyxjax.errors import translated
from cyxjax.train.program import Program

PyTree = Any


def check_float16(program: Program, state: TrainState, inputs: PyTree, replicas: int) -> None:
    """The model asks for nothing that the backend lacks; `inputs` are of one sample. Nothing is compiled.

    For float16: of the precisions it alone is half supported on some backends, and other runs need not wait
    for the program to be made twice.
    Raises: ConfigError that names the precision and the backend: on CPU `jax.nn.dot_product_attention` has no
        float16 (jax 0.10.2).
    """
    each = batch_shapes(inputs, replicas)
    with translated():
        program.predict_step.lower(jax.eval_shape(program.consensus, state), each)
