"""Exports a trained model as one program, StableHLO or ONNX; its outputs must equal the model's."""

import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from cyxjax.core.trees import PyTree, batch_shapes, named_leaves
from cyxjax.errors import ConfigError, DataError
from cyxjax.files import write_whole
from cyxjax.plugins import extra

Forward = Callable[[PyTree], PyTree]
_ROUNDING = 1e-6  # values that are 0 except for float32 rounding, such as a mean of normalised numbers
_FREE_DIM = "rows"  # the name of a batch dimension of any size


class Made(NamedTuple):
    """An exported program."""

    data: bytes
    run: Callable[[PyTree], Sequence[Any]]  # the program, read back: inputs -> leaves of its outputs
    takes: str  # a description to print


def write_program(
    path: Path,
    form: str,
    forward: Forward,
    inputs: PyTree,
    *,
    batch_size: int | None = None,
    platforms: Sequence[str] = (),
) -> str:
    """Writes `forward` as "stablehlo" (jax.export) or "onnx" (jax2onnx), and returns a line about the file.

    forward: inputs (B, ...) -> outputs, in evaluation mode. inputs: some samples' (N, ...). batch_size: B;
    None: any. platforms: of StableHLO, besides this process's own.
    To run it: `jax.export.deserialize(bytearray(open(path, "rb").read())).call(inputs)`; an input of ONNX is
    named as in the tree of inputs, `x` if there is only one.
    Raises: ConfigError for a model that cannot be exported in this form, or if the extra is not installed;
        DataError if the program computes different values than the model; no file is left then.
    """
    # StableHLO is the same program on the same machine, but compiled separately; onnxruntime has different
    # kernels in a different order (measured: 4e-6 for mlp, cnn and gpt).
    make, tolerance, needed = {
        "stablehlo": (_stablehlo, 1e-5, ("flatbuffers", "cyxjax[export]")),
        "onnx": (_onnx, 1e-4, ("jax2onnx", "cyxjax[onnx]")),
    }[form]
    few = jax.tree.map(lambda a: np.resize(a, (batch_size or len(a), *a.shape[1:])), inputs)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the converter prints, warns and logs
        extra(*needed)
        try:
            made = make(forward, inputs, batch_size, platforms)
            found = made.run(few)
        except Exception as err:  # whatever a model, a converter or a runtime raises
            text = " ".join(str(err).split())[:240]
            raise ConfigError(
                f"the model cannot be written as {form}: {type(err).__name__}: {text} HINT: try "
                "--batch-size 1: its code may need a fixed number of rows; --to safetensors keeps parameters."
            ) from err
    for (name, other), one in zip(named_leaves(jax.jit(forward)(few)), found, strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        noise = tolerance * np.max(np.abs(b[np.isfinite(b)]), initial=0.0) + _ROUNDING
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=noise):
            raise DataError(
                f"the exported program computes different values (output {name or 'of the model'}). "
                "HINT: use --to safetensors, and open an issue with the model."
            )
    write_whole(path, made.data)
    rows = "any number of rows" if batch_size is None else f"{batch_size} rows"
    return f"{len(made.data) / 1e6:.2f} MB, {made.takes}, {rows}"


def _stablehlo(forward: Forward, inputs: PyTree, batch_size: int | None, platforms: Sequence[str]) -> Made:
    rows = export.symbolic_shape(_FREE_DIM)[0] if batch_size is None else batch_size
    all_platforms = tuple(dict.fromkeys([export.default_export_platform(), *platforms]))
    made = export.export(jax.jit(forward), platforms=all_platforms)(batch_shapes(inputs, rows))
    data = bytes(made.serialize())
    run = export.deserialize(bytearray(data)).call
    return Made(data, lambda given: jax.tree.leaves(run(given)), f"for {', '.join(made.platforms)}")


def _onnx(forward: Forward, inputs: PyTree, batch_size: int | None, platforms: Sequence[str]) -> Made:
    runtime = extra("onnxruntime", "cyxjax[onnx]")
    leaves, form = jax.tree.flatten(inputs)
    outputs = named_leaves(jax.eval_shape(forward, inputs))
    takes = [name.replace("/", ".") or "x" for name, _ in named_leaves(inputs)]
    made = extra("jax2onnx", "cyxjax[onnx]").to_onnx(
        lambda *given: jax.tree.leaves(forward(jax.tree.unflatten(form, given))),
        [jax.ShapeDtypeStruct((batch_size or _FREE_DIM, *leaf.shape[1:]), leaf.dtype) for leaf in leaves],
        model_name="cyxjax",
        input_names=takes,
        output_names=[name.replace("/", ".") or "output" for name, _ in outputs],
    )
    data = made.SerializeToString()
    silent = runtime.SessionOptions()
    silent.log_severity_level = 4  # errors are raised
    session = runtime.InferenceSession(data, silent, providers=["CPUExecutionProvider"])
    run = lambda given: session.run(None, dict(zip(takes, jax.tree.leaves(given), strict=True)))  # noqa: E731
    return Made(data, run, f"inputs {', '.join(takes)}")
