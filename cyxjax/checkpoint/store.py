"""One folder of steps: writes, prunes and sets aside steps in the caller's thread, one call at a time."""

import hashlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cyxjax.checkpoint import folders
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import (
    BY_SHARE,
    FORMAT_VERSION,
    MANIFEST,
    FileEntry,
    Manifest,
    decode,
    find_problems,
    loaded_versions,
    manifest_bytes,
)
from cyxjax.checkpoint.writers import ALONE, Note, Writers, is_spread, leaves_of, write_together
from cyxjax.errors import CheckpointError
from cyxjax.files import PRIVATE, scaled, sync, write_whole

Best = Literal["min", "max"]


def kept_steps(
    metrics: Mapping[int, float | None], keep_last: int, keep_best: int, best: Best = "min"
) -> set[int]:
    """Of the steps in `metrics`, the `keep_last` newest and the `keep_best` best; ties go to the newer step.

    Steps whose metric is missing or not finite are never among the best.
    """
    sign = 1.0 if best == "min" else -1.0
    ranked = [
        (sign * value, -step) for step, value in metrics.items() if value is not None and math.isfinite(value)
    ]
    return set(sorted(metrics)[-keep_last:]) | {-step for _, step in sorted(ranked)[:keep_best]}


class _Facts(NamedTuple):
    """What later saves need of a step."""

    metric: float | None
    monitor: str  # the name of the metric: a loss is never compared with an accuracy of a different start
    created_unix_s: float

    @classmethod
    def of(cls, manifest: Manifest) -> "_Facts":
        config = manifest.meta.get("config")
        monitor = str(config.get("monitor", "")) if isinstance(config, dict) else ""
        return cls(manifest.metric, monitor, manifest.created_unix_s)


class Snapshot(NamedTuple):
    """The contents of one step."""

    step: int
    arrays: dict[str, Any]  # host arrays and shares; leaves on the devices if no copy is made
    meta: dict[str, Any]
    metric: float | None

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in self.arrays.values())


class StepStore:
    """The steps below `directory`, which only a writer creates, removes or changes.

    Raises: CheckpointError if the folder cannot be written or holds a symlink.
    """

    def __init__(self, directory: Path, *, is_writer: bool) -> None:
        self.directory, self.is_writer = directory, is_writer
        self._facts: dict[bytes, _Facts] = {}  # by the digest of the manifest
        self._owner = f"{secrets.token_hex(4)}-{os.getpid()}"
        if is_writer:
            folders.prepare(directory)
            self._known = directory.stat()
        else:
            list_steps(directory)

    def write(self, snapshot: Snapshot, writers: Writers = ALONE) -> None:
        """Writes `snapshot` to disk; the step exists when this returns, and nothing of it if this raises.

        Called by all processes of `writers`, each with its shares; raises on all of them.
        """
        write_together(
            self.directory,
            snapshot.arrays,
            writers,
            lambda: self._writing(snapshot.step),
            lambda folder, notes: self._commit(folder, snapshot, notes),
        )

    def _commit(self, folder: Path, snapshot: Snapshot, notes: list[Note]) -> None:
        """Writes the manifest, which completes the files of a step."""
        step, arrays, meta, metric = snapshot
        version = BY_SHARE if is_spread(arrays) else FORMAT_VERSION
        leaves, files = leaves_of(arrays, notes), tuple(FileEntry(**note["file"]) for note in notes)
        at_s = time.time()
        for newest in list_steps(self.directory)[-1:]:
            with suppress(CheckpointError):  # later than that of a machine whose clock is ahead of ours
                at_s = max(at_s, self._facts_of(newest).created_unix_s + 0.001)
        manifest = Manifest(step, leaves, files, meta, metric, loaded_versions(), at_s, version)
        data = manifest.encode()
        self._facts[hashlib.sha256(data).digest()] = _Facts.of(manifest)
        write_whole(folder / MANIFEST, data, mode=PRIVATE, synced=False)
        sync(folder / MANIFEST)  # its name is synced with the folder, once, before the rename to a step

    def _facts_of(self, step: int) -> _Facts:
        """The facts of a step; a manifest is decoded once, which takes 30 ms for a history of 5,000 epochs.

        Raises: CheckpointError, OSError.
        """
        data = manifest_bytes(step_folder(self.directory, step))
        digest = hashlib.sha256(data).digest()
        if digest not in self._facts:
            self._facts[digest] = _Facts.of(decode(data))
        return self._facts[digest]

    def _writing(self, step: int) -> AbstractContextManager[Path]:
        """A private folder that becomes `step`."""
        folders.refuse_swapped(self.directory, self._known)
        if not self.directory.exists():  # deleted: no other job is in the run folder
            folders.prepare(self.directory)
            self._known = self.directory.stat()
        return folders.writing(self.directory, step, self._owner)

    def metrics(self) -> dict[int, float | None]:
        """Metric by step, of steps with a readable manifest; None for a step without one, or whose metric is
        not that of the newest step.
        """
        found: dict[int, float | None] = {}
        monitors: list[str] = []
        for step in reversed(list_steps(self.directory)):
            try:
                facts = self._facts_of(step)
            except (CheckpointError, OSError):
                continue  # not a step: it is neither counted nor deleted
            monitors.append(facts.monitor)
            found[step] = facts.metric if facts.monitor == monitors[0] else None
        return found

    def prune(self, keep_last: int, keep_best: int, best: Best, written: int | None = None) -> list[int]:
        """Deletes all but the newest and best steps, never the only good one; returns the deleted steps.

        written: a step that was just written, and need not be verified.
        """
        metrics = self.metrics()
        kept = kept_steps(metrics, keep_last, keep_best, best)
        gone = sorted(metrics.keys() - kept) if self.is_writer else []
        is_good = lambda step: not find_problems(step_folder(self.directory, step), step)  # noqa: E731
        if gone and written not in kept and not any(map(is_good, sorted(kept, reverse=True))):
            last_good = next(filter(is_good, reversed(gone)), None)
            gone = [step for step in gone if step != last_good]
        for step in gone:
            folders.remove(self.directory, step, self._owner)
        return gone


_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")


def describe_failure(snapshot: Snapshot, error: BaseException, directory: Path, in_a_row: int) -> str:
    """One line for a failed save whose own files are gone; for a full disk with the bytes of the arrays."""
    what = f"{type(error).__name__}: {str(error)[:300]}"
    if any(text in str(error) for text in _FULL_TEXTS):  # also in the error of another process
        free = scaled(shutil.disk_usage(directory).free, "B")
        what = f"the disk is full: {scaled(snapshot.num_bytes, 'B')} needed for its arrays, {free} free"
    return (
        f"Checkpoint step {snapshot.step} was not saved in {directory} ({in_a_row} in a row): {what}. "
        "Training goes on; earlier steps are unchanged. HINT: check the disk."
    )
