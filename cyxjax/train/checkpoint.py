"""Steps of a run on disk: saved in the background, restored newest first, never restored damaged.

save: host copy (the only part the loop waits for) -> arrays -> digests -> MANIFEST.json -> one rename.
restore: newest step whose every file verifies; a damaged one is set aside and the next older is taken.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from cyxjax.errors import CheckpointError
from cyxjax.train import state_tree, step_folders
from cyxjax.train.array_store import read_arrays, write_arrays
from cyxjax.train.manifest import (
    MANIFEST,
    Leaf,
    Manifest,
    describe_files,
    find_problems,
    frozen_json,
    installed_versions,
    read_manifest,
)
from cyxjax.train.retention import Best, kept_steps
from cyxjax.train.save_failure import describe_failure
from cyxjax.train.state_tree import Adapt, PyTree, ToHost
from cyxjax.train.step_folders import ARRAYS, list_corrupt, list_steps, step_folder

_LOG = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A restored step: `state` has the target's tree with numpy leaves; `meta` as it was given to save."""

    step: int
    state: PyTree
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores the steps of one run below `directory`.

    Args:
        keep_last, keep_best: how many of the newest and of the best (by metric) steps outlive a save.
        best: whether a low ("min") or a high ("max") metric is good.
        is_writer: one process of a job writes. The others take part in collective `to_host` calls and
            restore; they change nothing on disk.
        async_save: write in a background thread. False: `save` returns when the step is on disk.
        to_host: leaf -> numpy array, for leaves spread over several processes; called on every process.
        warn: takes one line of text; the default logs it.
        max_failures: so many failed saves in a row are an error; fewer are warnings and training goes on.
    Raises: CheckpointError if the folder cannot be written or holds a symlink.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        best: Best = "min",
        is_writer: bool = True,
        async_save: bool = True,
        to_host: ToHost = state_tree.refuse_spread,
        warn: Callable[[str], None] = _LOG.warning,
        max_failures: int = 3,
    ) -> None:
        if keep_last < 1 or keep_best < 0 or max_failures < 1:
            raise CheckpointError(
                f"{keep_last=}, {keep_best=}, {max_failures=}: they must be at least 1, 0 and 1. "
                "HINT: keep_last=1 keeps the newest step only."
            )
        self.directory = Path(os.path.abspath(directory))
        self.saved_step: int | None = None  # the last step this object put on disk
        self._keep_last, self._keep_best, self._best = keep_last, keep_best, best
        self._is_writer, self._async = is_writer, async_save
        self._to_host, self._warn, self._max_failures = to_host, warn, max_failures
        self._owner = f"{secrets.token_hex(4)}-{os.getpid()}"
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []  # in a row
        self._verified: set[int] = set()
        if is_writer:
            step_folders.prepare(self.directory)
        else:
            list_steps(self.directory)

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Put `state` on disk as `step`, in place of a step of that number; older steps are pruned after it.

        Waits for a previous save to end, then only for the copy to the host: `state` may be donated after.
        Raises: CheckpointError for leaves or meta that cannot be stored, and after max_failures in a row.
        """
        step_folder(self.directory, step)
        frozen_meta = frozen_json(meta or {}, f"meta of step {step}")
        self.wait()
        arrays = state_tree.host_copy(state, self._to_host, keep=self._is_writer)
        if not self._is_writer:
            return
        args = (step, arrays, frozen_meta, metric)
        self._thread = threading.Thread(target=self._try_write, args=args, name="checkpoint", daemon=True)
        self._thread.start()
        if not self._async:
            self.wait()

    def restore(
        self, target: PyTree, step: int | None = None, *, adapt: Adapt | None = None, part: bool = False
    ) -> Restored | None:
        """The newest good step, or exactly `step`, in `target`'s tree; None if none was ever saved.

        Args:
            target: arrays or ShapeDtypeStructs; numpy arrays come back in their places.
            adapt: settles leaves stored with another shape or dtype (see state_tree.cast); None refuses them.
            part: `target` may be a part of what is stored, such as the parameters alone.
        Raises: CheckpointError if `step` is missing or damaged, if every step is damaged (all are listed,
            nothing is renamed), or if the state is another one (its leaves are named).
        """
        self.wait()
        if step is not None:
            return self._load_only(step, target, adapt, part)
        bad: dict[int, list[str]] = {}
        for candidate in reversed(list_steps(self.directory)):
            bad[candidate] = self.verify(candidate)
            restored = None if bad[candidate] else self._load(candidate, target, adapt, part, bad)
            if restored is not None:
                del bad[candidate]
                self._set_aside(bad)
                return restored
        self._refuse_silent_start(bad)
        return None

    def steps(self) -> list[int]:
        """Steps with a readable manifest, oldest first. Their files are not read: see verify."""
        return sorted(self._metrics())

    def latest_step(self) -> int | None:
        """The newest step that verifies, or None. Reads the files of steps not verified before."""
        return next((step for step in reversed(list_steps(self.directory)) if self._is_good(step)), None)

    def verify(self, step: int) -> list[str]:
        """What is wrong with `step`, [] if nothing: every file is read and its digest compared."""
        problems = find_problems(step_folder(self.directory, step), step)
        if not problems:
            self._verified.add(step)
        return problems

    def prune(self) -> list[int]:
        """Delete all but the newest and best steps now; the steps that went. The only good one never goes."""
        self.wait()
        return self._prune()

    def rewind(self, step: int) -> list[int]:
        """Set aside (rename) the steps after `step`, which a run that goes on from it will make anew."""
        self.wait()
        later = [s for s in list_steps(self.directory) if s > step] if self._is_writer else []
        for s in later:
            step_folders.set_aside(self.directory, s, "abandoned")
        return later

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the pending save; whether none is pending any more.

        Raises: CheckpointError if the last max_failures saves have all failed.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        self._raise_after_failures()
        return True

    def close(self) -> None:
        """Wait for the pending save. Raises as wait does."""
        self.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_write(
        self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any], metric: float | None
    ) -> None:
        try:
            self._write(step, arrays, meta, metric)
        except Exception as error:  # a disk, orbax, TensorStore raise anything: said, and training goes on
            self._failures.append(error)
            need_bytes = sum(array.nbytes for array in arrays.values())
            self._warn(describe_failure(step, error, self.directory, need_bytes, len(self._failures)))
        else:
            self.saved_step = step
            self._failures.clear()
            self._prune_or_warn()

    def _write(
        self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any], metric: float | None
    ) -> None:
        with step_folders.writing(self.directory, step, self._owner) as folder:
            leaves = tuple(Leaf.of(name, array) for name, array in arrays.items())
            write_arrays(folder / ARRAYS, arrays)
            files = describe_files(folder)
            manifest = Manifest(step, leaves, files, meta, metric, installed_versions(), time.time())
            step_folders.write_private(folder / MANIFEST, manifest.encode())
        self._verified.add(step)

    def _prune_or_warn(self) -> None:
        try:
            self._prune()
        except (OSError, CheckpointError) as error:
            self._warn(f"Old checkpoints in {self.directory} stay: {error}. HINT: check its permissions.")

    def _prune(self) -> list[int]:
        metrics = self._metrics()
        kept = kept_steps(metrics, self._keep_last, self._keep_best, self._best)
        gone = sorted(metrics.keys() - kept) if self._is_writer else []
        if gone and not any(self._is_good(step) for step in sorted(kept, reverse=True)):
            gone = [step for step in gone if step != next(filter(self._is_good, reversed(gone)), None)]
        for step in gone:
            step_folders.remove(self.directory, step, self._owner)
        return gone

    def _metrics(self) -> dict[int, float | None]:
        found: dict[int, float | None] = {}
        for step in list_steps(self.directory):
            try:
                found[step] = read_manifest(step_folder(self.directory, step)).metric
            except CheckpointError:
                continue  # not a step: it neither counts as kept nor is it ours to delete
        return found

    def _is_good(self, step: int) -> bool:
        return step in self._verified or not self.verify(step)

    def _load_only(self, step: int, target: PyTree, adapt: Adapt | None, part: bool) -> Restored:
        problems: dict[int, list[str]] = {step: self.verify(step)}
        restored = None if problems[step] else self._load(step, target, adapt, part, problems)
        if restored is None:
            raise CheckpointError(
                f"Step {step} in {self.directory} cannot be restored: {'; '.join(problems[step])}. "
                f"HINT: steps with a manifest: {self.steps()}."
            )
        return restored

    def _load(
        self, step: int, target: PyTree, adapt: Adapt | None, part: bool, bad: dict[int, list[str]]
    ) -> Restored | None:
        """The verified `step`; None, with the reason in `bad`, if its arrays cannot be read nevertheless."""
        folder = step_folder(self.directory, step)
        manifest = read_manifest(folder)
        unlike = state_tree.differences({leaf.name: leaf for leaf in manifest.leaves}, target, part=part)
        if adapt is None:
            state_tree.refuse(unlike)
        try:
            arrays = read_arrays(folder / ARRAYS, manifest.leaves)
        except Exception as error:  # orbax and TensorStore have no family of errors of their own
            bad[step] = [f"its arrays cannot be read: {type(error).__name__}: {str(error)[:300]}"]
            return None
        return Restored(step, state_tree.fill(target, arrays, adapt, unlike), manifest.meta)

    def _set_aside(self, bad: dict[int, list[str]]) -> None:
        for step, problems in bad.items():
            what = f"Checkpoint step {step} in {self.directory} is damaged: {'; '.join(problems[:5])}."
            if not self._is_writer:
                self._warn(f"{what} The next older one is used.")
                continue
            aside = step_folders.set_aside(self.directory, step, "corrupt")
            self._warn(f"{what} It is kept as {aside.name}; the next older step is used.")

    def _refuse_silent_start(self, bad: dict[int, list[str]]) -> None:
        lines = [f"step {step}: {'; '.join(problems[:5])}" for step, problems in bad.items()]
        lines += [f"{name}: set aside earlier" for name in list_corrupt(self.directory)]
        if lines:
            raise CheckpointError(
                f"No checkpoint in {self.directory} is good:\n  " + "\n  ".join(lines) + "\n"
                "HINT: to start from scratch name another folder; nothing was deleted."
            )

    def _raise_after_failures(self) -> None:
        if len(self._failures) >= self._max_failures:
            raise CheckpointError(
                f"The last {len(self._failures)} checkpoints could not be saved in {self.directory}; last: "
                f"{type(self._failures[-1]).__name__}: {str(self._failures[-1])[:300]}. "
                "HINT: free space or name another folder, then rerun the same command."
            ) from self._failures[-1]


class NullCheckpointer:
    """A Checkpointer that is off: saves nothing, finds nothing."""

    saved_step: int | None = None

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Do nothing."""

    def restore(
        self, target: PyTree, step: int | None = None, *, adapt: Adapt | None = None, part: bool = False
    ) -> None:
        """None: there is never a step."""

    def steps(self) -> list[int]:
        return []

    def latest_step(self) -> None:
        """None: there is never a step."""

    def verify(self, step: int) -> list[str]:
        return [f"step {step} does not exist: checkpoints are off"]

    def prune(self) -> list[int]:
        return []

    def rewind(self, step: int) -> list[int]:
        del step
        return []

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return True

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> "NullCheckpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing."""
