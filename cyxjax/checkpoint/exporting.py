"""Parameters of a step for other programs: one safetensors file, or orbax's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyxjax.checkpoint.arrays import Entry, write_file
from cyxjax.checkpoint.folders import list_steps
from cyxjax.checkpoint.manifest import Manifest
from cyxjax.checkpoint.store import StepStore
from cyxjax.errors import CheckpointError
from cyxjax.files import replacing


def good_step(store: StepStore, step: int | None) -> tuple[int, Manifest]:
    """`step`, or the newest that verifies, with its manifest. Raises: CheckpointError if it is not good."""
    if step is None:
        step = next(filter(store.is_good, reversed(list_steps(store.directory))), None)
    if step is None:
        raise CheckpointError(
            f"No step in {store.directory} is good. HINT: `cyxjax checkpoint verify` says why."
        )
    try:
        return step, store.manifest(step)
    except CheckpointError as error:
        raise CheckpointError(f"Step {step} cannot be exported: {error}. HINT: take another step.") from error


def to_safetensors(path: Path, entries: Mapping[str, Entry], about: Mapping[str, str]) -> None:
    """One file, a block of an entry in memory at a time; about: texts for its header.

    Raises: CheckpointError if it cannot be written.
    """
    try:
        with replacing(path) as draft:
            write_file(draft, entries, about, mode=0o666)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. HINT: name a file this user may write.") from error


def to_orbax(folder: Path, arrays: Mapping[str, Any]) -> None:
    """A new folder, as plain orbax reads it. Raises: CheckpointError if it is there, or cannot be made."""
    from cyxjax.checkpoint.orbax_arrays import export

    if folder.exists():
        raise CheckpointError(f"{folder} is there already. HINT: name a new folder.")
    try:
        export(folder, {name: array for name, array in arrays.items() if array.size})
    except Exception as error:  # orbax and TensorStore have no family of errors of their own
        raise CheckpointError(
            f"{folder}: {str(error)[:300]}. HINT: name a place this user may write."
        ) from error
