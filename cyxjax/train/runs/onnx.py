"""Exports a trained model to ONNX with jax2onnx; onnxruntime must compute the same outputs."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError
from cyxjax.files import write_whole
from cyxjax.train.runs.exported import (
    cannot_be_written,
    refuse_other_outputs,
    refuse_too_large,
    rows_of,
)

PyTree = Any
_ROOM = 1e-4  # relative; other kernels in another order (measured: 4e-6 for mlp, cnn and gpt)
_ROWS = "rows"  # the name of the free dimension


def write_onnx(
    path: Path,
    forward: Callable[[PyTree], PyTree],
    inputs: PyTree,
    *,
    num_bytes: int,
    batch_size: int | None = None,
) -> str:
    """Writes `forward` and says in one line what it takes; onnxruntime's outputs equal ours first.

    forward, inputs, num_bytes, batch_size: as of `write_stablehlo`. An input is named as in the tree of
    inputs, `x` where there is one alone.
    Raises: ConfigError for a model that cannot be written so, or where the extra is not installed; DataError
        if what was written computes something else, and nothing is left then.
    """
    refuse_too_large("an ONNX", num_bytes)
    _refuse_without_the_extra()
    names = [name.replace("/", ".") or "x" for name, _ in named_leaves(inputs)]
    try:
        with _quiet():
            data = _converted(forward, inputs, names, batch_size)
        few = rows_of(inputs, batch_size)
        found = _run(data, dict(zip(names, jax.tree.leaves(few), strict=True)))
    except Exception as err:  # whatever a model, the converter or the runtime raises
        raise cannot_be_written("ONNX", err, batch_size) from err
    refuse_other_outputs(found, jax.tree.leaves(forward(few)), _ROOM)
    write_whole(path, data)
    rows = "any number of rows" if batch_size is None else f"{batch_size} rows"
    return f"{len(data) / 1e6:.2f} MB, inputs {', '.join(names)}, {rows}"


def _refuse_without_the_extra() -> None:
    missing = [name for name in ("jax2onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ONNX is written by jax2onnx and checked by onnxruntime; not installed: {', '.join(missing)}. "
            "HINT: pip install 'cyxjax[onnx]'."
        )


def _converted(forward: Callable, inputs: PyTree, names: list[str], batch_size: int | None) -> bytes:
    """The serialized model: inputs by `names`, outputs by theirs."""
    from jax2onnx import to_onnx

    leaves, form = jax.tree.flatten(inputs)
    rows: Any = _ROWS if batch_size is None else batch_size
    shapes = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    outputs = named_leaves(jax.eval_shape(forward, inputs))
    made = to_onnx(
        lambda *given: jax.tree.leaves(forward(jax.tree.unflatten(form, given))),
        shapes,
        model_name="cyxjax",
        input_names=names,
        output_names=[name.replace("/", ".") or "output" for name, _ in outputs],
    )
    return made.SerializeToString()


def _run(data: bytes, inputs: dict[str, Any]) -> list[np.ndarray]:
    """What onnxruntime's CPU gives for `inputs`."""
    import onnxruntime

    silent = onnxruntime.SessionOptions()
    silent.log_severity_level = 4  # what is wrong is raised
    session = onnxruntime.InferenceSession(data, silent, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


@contextmanager
def _quiet() -> Iterator[None]:
    """The converter prints, warns, and gives the root logger a handler: none of that outlives it."""
    root, disabled = logging.getLogger(), logging.root.manager.disable
    handlers = list(root.handlers)
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
