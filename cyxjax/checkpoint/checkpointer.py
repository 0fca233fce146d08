"""Steps of a run on disk: saved in the background, and restored from the newest step that verifies.

save: host copy (the only part that the loop waits for) -> arrays -> digests -> MANIFEST.json -> one rename.
restore: the newest step whose files all verify; a damaged step is set aside and the next older one is used.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cyxjax.checkpoint import restoring, tree
from cyxjax.checkpoint.folders import list_steps, set_aside
from cyxjax.checkpoint.manifest import Manifest, frozen_json
from cyxjax.checkpoint.restoring import Restored
from cyxjax.checkpoint.store import Best, Snapshot, StepStore, describe_failure
from cyxjax.checkpoint.tree import Adapt, Put, PyTree, is_share
from cyxjax.checkpoint.writers import ALONE, Writers, is_spread
from cyxjax.errors import CheckpointError, CyxjaxError, DamagedStep, GroupError

_RETRY_S = 1.0  # before the last save is tried again after a failure; doubled each time
_AFTER_ERROR_S = 5.0  # how long a program that ends with an error waits for a save in the background
_LOG = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores the steps of one run below `directory`.

    Args:
        keep_last, keep_best: number of newest and of best steps (by metric) that are kept after a save.
        best: whether a low ("min") or a high ("max") metric is better.
        is_writer: whether this is the first process of a job, which writes. The others restore, and write
            only their shares.
        async_save: write in a background thread, from a host copy of everything that this process writes.
            False: `save` returns when the step is on disk; leaves are copied from the devices one by one.
        writers: the processes of the job, which write a distributed state together and restore the same step.
            Its exchange is called from the background thread: nothing else in the process may use it.
        warn: receives one line of text; the default logs it.
        max_failures: this many failed saves in a row are an error; fewer are warnings and training continues.
        known: a manifest of `newest_manifest`; the files of that step are not verified a second time.
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
        writers: Writers = ALONE,
        warn: Callable[[str], None] = _LOG.warning,
        max_failures: int = 3,
        known: Manifest | None = None,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self._store = StepStore(self.directory, is_writer=is_writer)
        self._keep: tuple[int, int, Best] = (keep_last, keep_best, best)
        self._async, self._writers, self._warn, self._max_failures = async_save, writers, warn, max_failures
        self._known = known
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []  # in a row
        self.unsaved = ""  # why the last state is not on disk, after `finish` gave up
        self._unsaved: Snapshot | None = None  # the newest state, if it could not be written
        self._alone: GroupError | None = None  # a process of the writers has ended

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Saves `state` as `step`, replacing a step with this number; older steps are pruned afterwards.

        Waits for the previous save, then only for the copy to the host: `state` may be donated afterwards.
        Raises: CheckpointError for leaves that cannot be stored, and after max_failures in a row; TypeError,
            ValueError for meta that is not JSON.
        """
        frozen_meta = frozen_json(meta or {})
        self.wait()
        leaves = tree.named_leaves(state)
        tree.refuse_unsavable(leaves)
        if not is_spread(leaves) and not self._store.is_writer:
            return
        if not self._async:
            self._write(Snapshot(step, leaves, frozen_meta, metric))
            self._raise_after_failures()
            return
        written = {name: leaf for name, leaf in leaves.items() if self._store.is_writer or is_share(leaf)}
        snapshot = Snapshot(step, tree.host_copy(written), frozen_meta, metric)
        # A daemon: if the interpreter exits meanwhile, a partial folder remains, but nothing hangs.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def restore(
        self,
        target: PyTree,
        step: int | None = None,
        *,
        adapt: Adapt | None = None,
        put: Put = lambda want, read: read(),
    ) -> Restored | None:
        """The newest good step, or exactly `step`, in `target`'s tree; None if none was ever saved.

        Args:
            target: arrays or ShapeDtypeStructs, which are replaced by numpy arrays; a HostShare is replaced
                by its elements, flat.
            adapt: converts leaves that were stored with a different shape or dtype; None refuses them.
            put: reads each leaf, one after the other, and returns the leaf of the restored tree.
        Raises: CheckpointError if `step` is missing or damaged, if every step is damaged (all are listed,
            nothing is renamed), or if the state does not match `target` (its leaves are named).
        """
        self.wait()
        load = partial(
            restoring.load,
            self.directory,
            writers=self._writers,
            known=self._known,
            target=target,
            adapt=adapt,
            put=put,
        )
        restored, damaged = restoring.newest(self.directory, self._writers, load, step)
        self._set_aside(damaged)
        return restored

    def newest_manifest(self) -> Manifest | None:
        """Manifest of the newest step that verifies, or None; all processes call it. Raises: as restore."""
        verified = partial(restoring.verified, self.directory, writers=self._writers, known=self._known)
        return restoring.newest(self.directory, self._writers, verified)[0]

    def steps(self) -> list[int]:
        """Steps with a readable manifest, oldest first. Their files are not read."""
        return sorted(self._store.metrics())

    def rewind(self, step: int, why: str = "abandoned") -> list[int]:
        """Sets aside (renames) the steps after `step`, which a run that resumes from it will write again.

        why: "abandoned", which `cyxjax checkpoint prune` deletes, or "earlier", which it leaves.
        """
        self.wait()
        if self._unsaved is not None and self._unsaved.step > step:
            self._unsaved = None
        later = [s for s in list_steps(self.directory) if s > step] if self._store.is_writer else []
        for s in later:
            set_aside(self.directory, s, why)
        return later

    def wait(self) -> None:
        """Waits for the pending save. Raises: CheckpointError if the last max_failures saves all failed."""
        self._join()
        self._raise_after_failures()

    def finish(self, patience_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Waits for the pending save, and repeats it for up to `patience_s` if it failed.

        Afterwards `unsaved` says whether it is on disk. `alive` is called regularly. Raises only GroupError,
        if a process that saves together with this one has ended.
        """
        self._join()
        self._raise_if_alone()
        if self._unsaved is not None and self._store.is_writer:
            self._warn(
                f"Step {self._unsaved.step} is the last one: its save is retried for {patience_s:g} s."
            )
        until, pause_s = time.monotonic() + patience_s, _RETRY_S
        while self._unsaved is not None and self._all_wait(until):
            alive()
            time.sleep(min(pause_s, max(until - time.monotonic(), 0)))
            pause_s *= 2
            self._write(self._unsaved, warn=lambda line: None)  # without repeating the warning
            self._raise_if_alone()
        if self._unsaved is not None:
            self.unsaved = f"{type(self._failures[-1]).__name__}: {str(self._failures[-1])[:300]}"
        self.forgive()

    def _all_wait(self, until: float) -> bool:
        """Whether `until` is still ahead, by the first process's clock if all processes save together."""
        mine = time.monotonic() < until
        together = self._unsaved is not None and is_spread(self._unsaved.arrays)
        return bool(self._writers.exchange("trying a save again", mine)[0]) if together else mine

    def _join(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds; returns whether no save is pending."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def forgive(self) -> None:
        """Forgets the failures so far: the next save is tried regardless of them."""
        self._join()
        self._failures.clear()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # If peers died, a save with them never ends; other errors of ours are raised on all processes.
        theirs_too = isinstance(error, CyxjaxError) and not isinstance(error, GroupError)
        if error is None or theirs_too or self._join(_AFTER_ERROR_S):
            self.wait()

    def _write(self, snapshot: Snapshot, warn: Callable[[str], None] | None = None) -> None:
        try:
            self._store.write(snapshot, self._writers if is_spread(snapshot.arrays) else ALONE)
        except GroupError as error:  # a process has ended, or is at a different point
            self._alone = error  # raised when the program waits for the save: this may be its thread
        except Exception as error:  # storage raises any error: it is reported, and training continues
            self._failures.append(error)
            self._unsaved = snapshot
            if self._store.is_writer:
                text = describe_failure(snapshot, error, self.directory, len(self._failures))
                (warn or self._warn)(text)
        else:
            self._unsaved = None
            self._failures.clear()
            if self._store.is_writer:
                self._prune_or_warn(snapshot.step)

    def _prune_or_warn(self, written: int) -> None:
        try:
            self._store.prune(*self._keep, written)
        except (OSError, CheckpointError) as error:
            self._warn(f"Old checkpoints in {self.directory} remain: {error}. HINT: check its permissions.")

    def _set_aside(self, damaged: dict[int, DamagedStep]) -> None:
        for step, error in damaged.items():
            text = f"Checkpoint step {step} in {self.directory} is damaged: {str(error).removesuffix('.')}."
            if self._store.is_writer:
                text += f" It is kept as {set_aside(self.directory, step, 'corrupt').name}."
            self._warn(f"{text} The next older step is used.")

    def _raise_if_alone(self) -> None:
        if self._alone is not None:
            raise self._alone

    def _raise_after_failures(self) -> None:
        self._raise_if_alone()
        if len(self._failures) >= self._max_failures:
            last = self._failures[-1]
            raise CheckpointError(
                f"The last {len(self._failures)} checkpoints could not be saved in {self.directory}; last: "
                f"{type(last).__name__}: {str(last)[:300]}. "
                "HINT: free space or name another folder, then rerun the same command."
            ) from last


class NullCheckpointer:
    """A Checkpointer that is turned off, with the methods that a fit calls: saves and finds nothing."""

    directory: Path | None = None
    unsaved = ""

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Do nothing."""

    def restore(self, target: PyTree, step: int | None = None, **options: Any) -> Restored | None:
        """Returns None: there is never a step."""
        return None

    def steps(self) -> list[int]:
        return []

    def rewind(self, step: int, why: str = "abandoned") -> list[int]:
        return []

    def wait(self) -> None:
        """Do nothing."""

    def finish(self, patience_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Do nothing."""

    def forgive(self) -> None:
        """Do nothing."""

    def __enter__(self) -> "NullCheckpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing."""


Checkpoints = Checkpointer | NullCheckpointer
