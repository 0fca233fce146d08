"""A copy of a run folder in an object store: uploads finished steps in the background, fetches the newest.

Logs are uploaded before a step's manifest, so they reach at least to the newest step in the store. A step
that was removed here while no process of the run ran stays in the store.
"""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cyxjax.checkpoint import folders
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import MANIFEST, Manifest, find_problems, list_files, manifest_bytes
from cyxjax.checkpoint.remote import RemoteRun
from cyxjax.checkpoint.restoring import open_step
from cyxjax.checkpoint.run_lock import locked
from cyxjax.errors import CheckpointError, ConfigError, DamagedStep
from cyxjax.files import write_whole
from cyxjax.redaction import describe
from cyxjax.run_folder import CHECKPOINTS, RunFolder

STALL_S, HURRIED_STALL_S = 30.0, 8.0  # longest wait at the end without progress: usual, after a stop
_MOST_S = 300.0  # how long `end` waits at most
_POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LOGS_EVERY_S = 30.0
_STAGE = ".mirror"  # in the checkpoint folder: hard links to the step that is being uploaded


class Mirror:
    """The run folder `folder` and its copy at `url`, of one process.

    Raises: ConfigError if no library for `url` is installed.
    """

    def __init__(self, url: str, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._url, self._folder, self._say = url, folder, say
        self._remote = RemoteRun(url)
        self._sent: dict[int, object] = {}  # step -> what distinguishes its local folder from a later one
        self._logs: dict[str, object] = {}
        self._logs_at_s, self._moved_s = 0.0, time.monotonic()
        self._ending, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def fetch(self, alive: Callable[[], None] = lambda: None) -> int | None:
        """Fetches the newest good step of the store and its logs; None if a good local step is newer.
        Later local steps are from another course of the run: they are kept as `step_*.earlier-*`.

        alive: called for each file, and for each part of it that arrives.
        Raises: ConfigError like `RemoteRun.check_bucket`; CheckpointError if the store cannot be read and
            there is no local step to continue from.
        """
        here, newest_s = list_steps(self._folder.checkpoints), 0.0
        with suppress(CheckpointError):  # there is no good local step
            newest_s = open_step(self._folder.checkpoints)[0].created_unix_s
        try:
            newer = [one for one in self._remote.manifests() if one.created_unix_s > newest_s]
            for manifest in newer:
                with suppress(DamagedStep):
                    return self._take(manifest, alive)
            if newer:
                raise CheckpointError(f"none of its newer steps is good: {[one.step for one in newer]}")
        except ConfigError:
            raise
        except Exception as err:  # a library raises its own errors
            if not here:
                raise CheckpointError(
                    f"mirror={self._url}: {describe(err)}. HINT: no checkpoint is here; try again when "
                    "the mirror can be read, or start over with resume: never."
                ) from err
            self._tell(err)
        return None

    def _take(self, manifest: Manifest, alive: Callable[[], None]) -> int:
        """Fetches the logs, then the step. Raises: DamagedStep, with nothing fetched, if it is not good."""
        checkpoints, step = self._folder.checkpoints, manifest.step
        with locked(self._folder.root):  # no other job writes there
            folders.prepare(checkpoints)
            with folders.writing(checkpoints, step, f"{secrets.token_hex(4)}-{os.getpid()}") as folder:
                for path in [*(entry.path for entry in manifest.files), MANIFEST]:
                    (folder / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with suppress(FileNotFoundError):  # find_problems reports it
                        self._remote.get_file(f"{_there(step)}/{path}", folder / path, alive)
                if problems := find_problems(folder, step):
                    raise DamagedStep("; ".join(problems))
                # read all before a local one is replaced
                logs = {log: self._remote.read(log.name) for log in self._folder.logs}
                for log, content in logs.items():
                    if content is not None:
                        write_whole(log, content)
                for later in list_steps(checkpoints):
                    if later > step:
                        folders.set_aside(checkpoints, later, "earlier")
            # From here on the step is local: a start that was interrupted earlier fetches all of it again.
        self._say(f"Took step {step} from {self._url}")
        return step

    def start(self) -> None:
        """Starts copying in the background."""
        self._thread.start()

    def end(self, hurried: bool, alive: Callable[[], None] = lambda: None) -> None:
        """Waits for a limited time until everything is in the store; warns if it is not."""
        began_s = self._moved_s = time.monotonic()
        patience_s = HURRIED_STALL_S if hurried else STALL_S
        self._ending.set()
        while self._thread.is_alive():
            now_s = time.monotonic()
            if now_s - self._moved_s > patience_s or now_s - began_s > _MOST_S:
                there = f"step {max(self._sent)}" if self._sent else "no step"
                self._say(f"WARNING: {self._url} is not complete: it has {there}. The run folder has it all.")
                return
            self._thread.join(0.2)
            alive()

    def _follow(self) -> None:
        pause_s = _POLL_S
        while True:
            ending = self._ending.is_set()
            try:
                self._copy(logs=ending or time.monotonic() > self._logs_at_s)
                pause_s = _POLL_S
                if ending:
                    return
            except Exception as err:  # training continues after any error of a store
                self._tell(err)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if ending:
                time.sleep(_POLL_S)
            else:
                self._ending.wait(pause_s)

    def _tell(self, err: BaseException) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"WARNING: mirror={self._url}: {describe(err)}. Training continues; it is tried again.")

    def _copy(self, logs: bool) -> None:
        """Copies the changes of the folder to the store. Raises what the store raises."""
        while (step := self._unsent()) is not None:
            self._send(step)
        if logs:
            self._send_logs()
        here = set(list_steps(self._folder.checkpoints))
        if here & self._sent.keys():  # else the folder was emptied or lost, and the store has the only copy
            for step in self._sent.keys() - here:
                self._remote.drop(_there(step))
                del self._sent[step]

    def _unsent(self) -> int | None:
        """The newest step that the store does not have."""
        marks = {step: self._mark(step) for step in list_steps(self._folder.checkpoints)}
        unsent = [step for step, mark in marks.items() if mark and mark != self._sent.get(step)]
        return max(unsent, default=None)

    def _mark(self, step: int) -> object:
        return _mark(step_folder(self._folder.checkpoints, step) / MANIFEST)

    def _send(self, step: int) -> None:
        """Copies a step; the folder here may be pruned meanwhile."""
        mark, source = self._mark(step), step_folder(self._folder.checkpoints, step)
        stage = self._folder.checkpoints / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        try:
            shutil.copytree(source, stage, copy_function=_link)
            manifest = manifest_bytes(stage)
        except (OSError, shutil.Error, CheckpointError):
            if mark is None or mark != self._mark(step):
                return  # pruned or replaced
            raise
        folder = _there(step)
        there = self._remote.read(f"{folder}/{MANIFEST}")
        if there != manifest:
            if there is not None:
                self._remote.drop_manifest(folder)  # from a different course of the run
            for name in list_files(stage):
                if name != MANIFEST:
                    self._remote.put_file(stage / name, f"{folder}/{name}", self._moved)
            self._send_logs()
            self._remote.put_file(stage / MANIFEST, f"{folder}/{MANIFEST}", self._moved)
        self._sent[step] = mark
        shutil.rmtree(stage, ignore_errors=True)

    def _send_logs(self) -> None:
        began_s = time.monotonic()
        for path in self._folder.logs:
            mark = _mark(path)
            if mark is not None and self._logs.get(path.name) != mark:
                self._remote.put_file(path, path.name, self._moved)
                self._logs[path.name] = mark
        now_s = time.monotonic()
        self._logs_at_s = now_s + max(_LOGS_EVERY_S, 10 * (now_s - began_s))

    def _moved(self, num_bytes: int) -> None:
        if num_bytes:
            self._moved_s = time.monotonic()


def _there(step: int) -> str:
    """The folder of a step in the store."""
    return step_folder(Path(CHECKPOINTS), step).as_posix()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _mark(path: Path) -> object:
    """Identifies a version of a file: it changes if the file is replaced or grows; None: no such file."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size
