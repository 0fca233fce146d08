"""Exports a trained model as StableHLO: forward pass and parameters in one file."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax import export

from cyxjax.core.trees import batch_shapes
from cyxjax.errors import ConfigError
from cyxjax.files import write_whole
from cyxjax.train.runs.exported import (
    cannot_be_written,
    refuse_other_outputs,
    refuse_too_large,
    rows_of,
)

PyTree = Any
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
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
    refuse_too_large("a StableHLO", num_bytes)
    shapes, here = _shapes(inputs, batch_size), export.default_export_platform()
    for platform in platforms:
        if platform not in PLATFORMS:
            raise ConfigError(f"platform {platform!r}: expected {', '.join(PLATFORMS)}. HINT: cpu,cuda")
    _refuse_without_flatbuffers()
    try:
        made = export.export(jax.jit(forward), platforms=tuple(dict.fromkeys([here, *platforms])))(shapes)
        data = bytes(made.serialize())
    except Exception as err:  # whatever a model, or a lowering for another platform, raises
        raise cannot_be_written("StableHLO", err, batch_size) from err
    few = rows_of(inputs, batch_size)
    refuse_other_outputs(export.deserialize(bytearray(data)).call(few), forward(few), _ROOM)
    write_whole(path, data)
    rows = "any number of rows" if batch_size is None else f"{batch_size} rows"
    return f"{len(data) / 1e6:.2f} MB, for {', '.join(made.platforms)}, {rows}"


def _refuse_without_flatbuffers() -> None:
    if find_spec("flatbuffers") is None:
        raise ConfigError(
            "StableHLO is written by jax.export with flatbuffers, which is not installed. "
            "HINT: pip install 'cyxjax[export]'."
        )


def _shapes(inputs: PyTree, batch_size: int | None) -> PyTree:
    rows = export.symbolic_shape("rows")[0] if batch_size is None else batch_size
    return batch_shapes(inputs, rows)
