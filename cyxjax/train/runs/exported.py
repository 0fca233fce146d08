"""Exports a trained model as one program, StableHLO or ONNX; its outputs must equal the model's."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from cyxjax.core.trees import batch_shapes, named_leaves
from cyxjax.errors import ConfigError, DataError
from cyxjax.files import write_whole
from cyxjax.plugins import extra

PyTree = Any
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
MOST_BYTES = 1 << 30  # of parameters: constants of the program, a protobuf of 2 GiB at most
_ROUNDING = 1e-6  # what is 0 but for the rounding of float32: a mean of normalised numbers
_FREE_DIM = "rows"  # the name of a batch dimension of any size


class Made(NamedTuple):
    """An exported program."""

    data: bytes
    run: Callable[[PyTree], PyTree]  # it itself, read back: inputs -> leaves of its outputs
    takes: str  # for people


def write_stablehlo(
    path: Path,
    forward: Callable[[PyTree], PyTree],
    inputs: PyTree,
    *,
    num_bytes: int,
    batch_size: int | None = None,
    platforms: Sequence[str] = (),
) -> str:
    """Writes `forward` with jax.export and returns a line about the file.

    forward: inputs (B, ...) -> outputs, in evaluation mode. inputs: some samples' (N, ...). num_bytes: of the
    parameters in it. batch_size: B; None: any. platforms: those of PLATFORMS besides this process's own.
    To run it: `jax.export.deserialize(bytearray(open(path, "rb").read())).call(inputs)`.
    Raises: ConfigError for a model that cannot be written so, or where the extra is not installed; DataError
        if what was written computes something else, and nothing is left then.
    """
    for platform in platforms:
        if platform not in PLATFORMS:
            raise ConfigError(f"platform {platform!r}: expected {', '.join(PLATFORMS)}. HINT: cpu,cuda")
    extra("flatbuffers", "cyxjax[export]")

    def make() -> Made:
        rows = export.symbolic_shape(_FREE_DIM)[0] if batch_size is None else batch_size
        all_platforms = tuple(dict.fromkeys([export.default_export_platform(), *platforms]))
        made = export.export(jax.jit(forward), platforms=all_platforms)(batch_shapes(inputs, rows))
        data = bytes(made.serialize())
        run = export.deserialize(bytearray(data)).call
        return Made(data, lambda given: jax.tree.leaves(run(given)), f"for {', '.join(made.platforms)}")

    # The same program on the same machine, but compiled apart.
    return _write(path, "StableHLO", make, forward, inputs, num_bytes, batch_size, tolerance=1e-5)


def write_onnx(
    path: Path,
    forward: Callable[[PyTree], PyTree],
    inputs: PyTree,
    *,
    num_bytes: int,
    batch_size: int | None = None,
) -> str:
    """Writes `forward` with jax2onnx and returns a line about the file, whose outputs onnxruntime computes.

    Arguments and errors as of `write_stablehlo`. An input is named as in the tree of inputs, `x` where there
    is one alone.
    """
    with _silenced():
        extra("jax2onnx", "cyxjax[onnx]")
    extra("onnxruntime", "cyxjax[onnx]")
    names = [name.replace("/", ".") or "x" for name, _ in named_leaves(inputs)]

    def make() -> Made:
        with _silenced():
            data = _to_onnx(forward, inputs, names, batch_size)
        run = lambda given: _run_onnx(data, dict(zip(names, jax.tree.leaves(given), strict=True)))  # noqa: E731
        return Made(data, run, f"inputs {', '.join(names)}")

    # Other kernels in another order (measured: 4e-6 for mlp, cnn and gpt).
    return _write(path, "ONNX", make, forward, inputs, num_bytes, batch_size, tolerance=1e-4)


def _write(
    path: Path,
    form: str,
    make: Callable[[], Made],
    forward: Callable[[PyTree], PyTree],
    inputs: PyTree,
    num_bytes: int,
    batch_size: int | None,
    *,
    tolerance: float,
) -> str:
    if num_bytes > MOST_BYTES:
        raise ConfigError(
            f"{num_bytes / 1e9:.1f} GB of parameters; a file of {form} holds at most {MOST_BYTES / 1e9:.1f}. "
            "HINT: --to safetensors, and the model's own code."
        )
    few = jax.tree.map(lambda a: np.resize(a, (batch_size or len(a), *a.shape[1:])), inputs)
    try:
        made = make()
        found = made.run(few)
    except Exception as err:  # whatever a model, a converter or a runtime raises
        text = " ".join(str(err).split())[:240]
        way = "--to safetensors keeps the parameters."
        if batch_size is None:
            way = "try --batch-size 1: its code may want a number of rows."
        raise ConfigError(
            f"the model cannot be written as {form}: {type(err).__name__}: {text} HINT: {way}"
        ) from err
    _refuse_other_outputs(found, forward(few), tolerance)
    write_whole(path, made.data)
    rows = "any number of rows" if batch_size is None else f"{batch_size} rows"
    return f"{len(made.data) / 1e6:.2f} MB, {made.takes}, {rows}"


def _refuse_other_outputs(found: Sequence[Any], wanted: PyTree, tolerance: float) -> None:
    """Raises: DataError for a leaf that differs by more than `tolerance`, relative to the largest."""
    for (name, other), one in zip(named_leaves(wanted), found, strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        noise = tolerance * np.max(np.abs(b), initial=0.0) + _ROUNDING
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=noise):
            raise DataError(
                f"what was exported computes something else (output {name or 'of the model'}). "
                "HINT: --to safetensors; open an issue, with the model."
            )


def _to_onnx(forward: Callable, inputs: PyTree, names: list[str], batch_size: int | None) -> bytes:
    """The serialized model: inputs by `names`, outputs by theirs."""
    from jax2onnx import to_onnx

    leaves, form = jax.tree.flatten(inputs)
    rows: Any = _FREE_DIM if batch_size is None else batch_size
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


def _run_onnx(data: bytes, inputs: dict[str, Any]) -> list[np.ndarray]:
    """What onnxruntime's CPU gives for `inputs`."""
    import onnxruntime

    silent = onnxruntime.SessionOptions()
    silent.log_severity_level = 4  # what is wrong is raised
    session = onnxruntime.InferenceSession(data, silent, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


@contextmanager
def _silenced() -> Iterator[None]:
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
