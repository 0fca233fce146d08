"""A trained model as one file that any program with StableHLO runs: forward pass and parameters."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError, DataError
from cyxjax.files import write_whole

PyTree = Any
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
MOST_BYTES = 1 << 30  # of parameters: constants of the program, a protobuf of 2 GiB at most
_ROOM = 1e-5  # relative; the same program on the same machine, but compiled apart


def write_stablehlo(
    path: Path,
    forward: Callable[[PyTree], PyTree],
    inputs: PyTree,
    *,
    num_bytes: int,
    batch_size: int | None = None,
    platforms: Sequence[str] = (),
) -> str:
    """Writes `forward` and says in one line what it takes; read back and run once before it takes its name.

    forward: inputs (B, ...) -> outputs, in evaluation mode. inputs: some samples' (N, ...). num_bytes: of the
    parameters in it. batch_size: B; None: any. platforms: those of PLATFORMS besides this process's own.
    To run it: `jax.export.deserialize(bytearray(open(path, "rb").read())).call(inputs)`.
    Raises: ConfigError for a model that cannot be written so; DataError if what was written computes
        something else, and nothing is left then.
    """
    if num_bytes > MOST_BYTES:
        raise ConfigError(
            f"{num_bytes / 1e9:.1f} GB of parameters; a StableHLO file holds at most {MOST_BYTES / 1e9:.1f}. "
            "HINT: --to safetensors, and the model's own code."
        )
    shapes, here = _shapes(inputs, batch_size), export.default_export_platform()
    for platform in platforms:
        if platform not in PLATFORMS:
            raise ConfigError(f"platform {platform!r}: expected {', '.join(PLATFORMS)}. HINT: cpu,cuda")
    _refuse_without_flatbuffers()
    try:
        made = export.export(jax.jit(forward), platforms=tuple(dict.fromkeys([here, *platforms])))(shapes)
        data = bytes(made.serialize())
    except Exception as err:  # whatever a model, or a lowering for another platform, raises
        raise ConfigError(
            f"the model cannot be written as StableHLO: {type(err).__name__}: {_brief(err)} HINT: "
            + ("try --batch-size 1: its code may want a number of rows." if batch_size is None else _FIXED)
        ) from err
    few = jax.tree.map(lambda a: np.resize(a, (batch_size or len(a), *a.shape[1:])), inputs)
    _refuse_other_outputs(export.deserialize(bytearray(data)).call(few), forward(few))
    write_whole(path, data)
    rows = "any number of rows" if batch_size is None else f"{batch_size} rows"
    return f"{len(data) / 1e6:.2f} MB, for {', '.join(made.platforms)}, {rows}"


_FIXED = "--to safetensors keeps the parameters."


def _refuse_without_flatbuffers() -> None:
    if find_spec("flatbuffers") is None:
        raise ConfigError(
            "StableHLO is written by jax.export with flatbuffers, which is not installed. "
            "HINT: pip install 'cyxjax[export]'."
        )


def _shapes(inputs: PyTree, batch_size: int | None) -> PyTree:
    rows = export.symbolic_shape("rows")[0] if batch_size is None else batch_size
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), inputs)


def _refuse_other_outputs(found: PyTree, wanted: PyTree) -> None:
    for (name, one), other in zip(named_leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if a.shape != b.shape or not np.allclose(a, b, rtol=_ROOM, atol=_ROOM * max(np.abs(b).max(), 1e-30)):
            raise DataError(
                f"what was exported computes something else (output {name or 'of the model'}). "
                "HINT: --to safetensors; tell us, with the model."
            )


def _brief(err: Exception) -> str:
    text = " ".join(str(err).split())
    return text if len(text) < 240 else text[:240] + "..."
