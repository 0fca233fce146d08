"""Restores a step on all processes of a job, with the same verdict on all of them.

The files of a step are compared with their digests once for all processes together; each process also checks
the crc32 of every byte that it reads. A step that one process finds damaged is damaged for all, and no
process continues from a step that another does not see, or that differs there.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cyxjax.checkpoint import tree
from cyxjax.checkpoint.arrays import StoredArrays
from cyxjax.checkpoint.folders import ARRAYS, list_aside, list_steps, step_folder
from cyxjax.checkpoint.manifest import MANIFEST, Leaf, Manifest, decode, find_problems, manifest_bytes
from cyxjax.checkpoint.tree import Adapt, Put, PyTree, is_share
from cyxjax.checkpoint.writers import ALONE, Writers
from cyxjax.errors import CheckpointError, DamagedStep

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A restored step: `state` has the target's tree with numpy leaves; `meta` is that of save."""

    step: int
    state: PyTree
    meta: dict[str, Any]


def newest(
    directory: Path, writers: Writers, load: Callable[[int], T], step: int | None = None
) -> tuple[T | None, dict[int, DamagedStep]]:
    """(the result of `load` for the newest good step, or None; the damaged steps after it).

    step: the only one that is tried. Raises: CheckpointError if it, or every step, is damaged or missing (all
    are listed), or if some processes see no step.
    """
    steps, aside = _seen(directory, writers) if step is None else ([step], [])
    damaged: dict[int, DamagedStep] = {}
    for number in reversed(steps):
        try:
            return load(number), damaged
        except DamagedStep as error:
            damaged[number] = error
    lines = [f"step {number}: {error}" for number, error in damaged.items()]
    lines += [f"{name}: set aside earlier" for name in aside]
    if lines:
        raise CheckpointError(
            f"Cannot use these checkpoints in {directory}: {'; '.join(lines)}. HINT: name another step or "
            "folder, or another checkpoint_dir to start over; nothing was deleted."
        )
    return None, damaged


def load(
    directory: Path,
    step: int,
    *,
    writers: Writers,
    known: Manifest | None,
    target: PyTree,
    adapt: Adapt | None,
    put: Put,
) -> Restored:
    """`step` in the target's tree, its leaves read one after the other; all processes of `writers` call it.

    known: see `verified`. adapt, put: see `Checkpointer.restore`.
    Raises: DamagedStep on all if one finds it damaged; CheckpointError if the state does not match.
    """
    manifest = verified(directory, step, writers, known)
    stored = _as_named_now(manifest.leaf_of)
    unlike = tree.differences(stored, target)
    if adapt is None:
        tree.refuse(unlike)
    arrays = StoredArrays(step_folder(directory, step) / ARRAYS, stored)
    found: list[PyTree] = []

    def read() -> None:
        adapted = _adapted(arrays, target, unlike, adapt)
        found.append(_filled(arrays, target, adapted, put))

    writers.all_do(f"reading checkpoint step {step}", read)
    return Restored(step, found[0], manifest.meta)


def _as_named_now(stored: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
    """The leaves of a checkpoint by their names in a state of this version.

    In 0.2.0 a run that left out steps counted them in its state: as `sync/skipped`, beside `sync/inner`.
    """
    if "sync/skipped" not in stored:
        return stored
    kept = {name: leaf for name, leaf in stored.items() if name != "sync/skipped"}
    if "sync/scale" in kept:  # of float16
        return kept
    return {name.replace("sync/inner", "sync", 1): leaf for name, leaf in kept.items()}


def verified(directory: Path, step: int, writers: Writers, known: Manifest | None = None) -> Manifest:
    """The manifest of `step`, after all files were compared with it; all processes of `writers` call it.

    known: a manifest that was verified before; the files of a step that still has it are not read again.
    Raises: DamagedStep on all if one finds a problem; CheckpointError if they do not see the same step.
    """
    folder = step_folder(directory, step)
    seal, manifest = _look_at(folder)
    seals = writers.exchange(f"looking at checkpoint step {step}", seal)
    if None in seals and any(seals):
        _refuse_elsewhere(directory, f"step {step} is not there", seals.index(None))
    if known is not None and manifest == known and len(set(seals)) == 1:
        return known
    # What is read from here on is exchanged: a step that its own job prunes now must not fail on one process.
    share = writers.rank, len(seals)
    found = (
        find_problems(folder, step, share) if manifest else [seal or f"{MANIFEST}: No such file or directory"]
    )
    problems = writers.exchange(f"verifying checkpoint step {step}", found)
    if lines := _each_once(problems):
        raise DamagedStep("; ".join(lines))
    if other := [rank for rank, seal in enumerate(seals) if seal != seals[0]]:
        _refuse_elsewhere(directory, f"step {step} is another one", other[0])
    assert manifest is not None  # else it has a problem
    return manifest


def open_step(directory: Path, step: int | None = None) -> tuple[Manifest, StoredArrays]:
    """(manifest, arrays) of `step`, or of the newest that verifies, for this process only.

    Later steps that are damaged are logged.
    Raises: CheckpointError if it is not good, also later when arrays are read.
    """
    look = partial(verified, directory, writers=ALONE)
    manifest, damaged = newest(directory, ALONE, look, step)
    for later, error in damaged.items():
        _LOG.warning("Checkpoint step %s in %s is damaged and not used: %s", later, directory, error)
    if manifest is None:
        raise CheckpointError(f"{directory} holds no checkpoint. HINT: name a folder with step_*.")
    return manifest, StoredArrays(step_folder(directory, manifest.step) / ARRAYS, manifest.leaf_of)


def _seen(directory: Path, writers: Writers) -> tuple[list[int], list[str]]:
    """(steps, names of what was set aside) as the first process sees them; only that process changes them."""
    notes = writers.exchange(
        "looking for checkpoints", [list_steps(directory), list_aside(directory, "corrupt")]
    )
    steps, aside = notes[0]
    if not steps and any(others for others, _ in notes):
        with_some = next(rank for rank, (others, _) in enumerate(notes) if others)
        _refuse_elsewhere(directory, f"no step is there (process {with_some} sees some)", 0)
    return steps, aside


def _refuse_elsewhere(directory: Path, what: str, rank: int) -> None:
    raise CheckpointError(
        f"Checkpoints in {directory}: for process {rank} {what}. HINT: name a folder that all hosts see, or "
        "copy it to all of them."
    )


def _look_at(folder: Path) -> tuple[str | None, Manifest | None]:
    """(a digest of the manifest of a step, the manifest), or (the error in reading it, None); (None, None) if
    the step does not exist.
    """
    if not folder.is_dir():
        return None, None
    try:
        data = manifest_bytes(folder)
        return hashlib.sha256(data).hexdigest(), decode(data)
    except CheckpointError as error:  # a problem of the step
        return str(error).partition(" HINT:")[0].rstrip("."), None


def _each_once(problems: list[list[str]]) -> list[str]:
    """Each problem once; with several processes, after the first process that found it."""
    finders = {line: rank for rank in reversed(range(len(problems))) for line in problems[rank]}
    return [f"process {rank}: {line}" if len(problems) > 1 else line for line, rank in finders.items()]


def _adapted(
    stored: StoredArrays, target: PyTree, unlike: Mapping[str, str], adapt: Adapt | None
) -> dict[str, np.ndarray]:
    """The leaves in `unlike`, converted by `adapt`. Raises: OtherStateError with those that it refuses."""
    found: dict[str, np.ndarray] = {}
    for name, want in tree.named_leaves(target).items():
        if adapt is not None and name in unlike and name in stored.leaves:
            array = adapt(name, stored.whole(name), want)
            if array is not None:
                found[name] = array
    tree.refuse({name: why for name, why in unlike.items() if name not in found})
    return found


def _filled(stored: StoredArrays, target: PyTree, adapted: dict[str, np.ndarray], put: Put) -> PyTree:
    """The target's tree with leaves that were adapted or are read from `stored`, one at a time in memory."""
    import jax

    def read(name: str, want: Any) -> np.ndarray:
        if name in adapted:
            return adapted.pop(name)
        # for a share its elements, flat
        return stored.part(name, want.start, want.stop) if is_share(want) else stored.whole(name)

    filled = [put(want, partial(read, name, want)) for name, want in tree.named_leaves(target).items()]
    return jax.tree.unflatten(jax.tree.structure(target), filled)
