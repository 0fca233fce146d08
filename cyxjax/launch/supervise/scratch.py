"""The launcher's folder under the temporary directory: heartbeats, error files and stacks of its ranks.

Cleaners of temporary files may remove it while a job runs. What a killed launcher left is removed by the next
launcher; of the error records of jobs without --log-dir the newest stay.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from cyxjax import files
from cyxjax.launch import output
from cyxjax.launch.failure.record import FIRST_ERROR

PREFIX, LOCK = "cyxjax-", "launcher.lock"
KEPT_RECORDS = 5


class Scratch:
    """A new folder at `path`, locked while this process lives."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir())
        for left in leftovers(folder):
            _remove(left)
        for left in kept_records(folder)[KEPT_RECORDS:]:
            shutil.rmtree(left, ignore_errors=True)
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._take()

    def ensure(self) -> None:
        """Creates the folder again, with a line, if it was removed."""
        if os.path.isdir(self.path):
            return
        old = self.path
        os.close(self._lock)
        try:
            os.mkdir(old, 0o700)  # where the ranks look; not one that another user has put there meanwhile
        except OSError:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._take()
        output.say(
            f"{old} was removed while the job was running and was created again as {self.path}. "
            f"HINT: keep cleaners off {PREFIX}*, or set TMPDIR to a folder that they do not clean."
        )

    def clear(self) -> None:
        """Removes the folder, except an error record in it."""
        _remove(Path(self.path))
        os.close(self._lock)

    def _take(self) -> None:
        """Locks the folder. The lock file gets its name when it is held, so that no process sees it free."""
        draft = os.path.join(self.path, f"{LOCK}.new")
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if os.name == "posix":
            files.try_flock(self._lock)
        os.replace(draft, os.path.join(self.path, LOCK))


def leftovers(folder: Path) -> list[Path]:
    """Folders in `folder` of launchers of this user that live no more: nobody holds their lock."""
    found: list[Path] = []
    for path in _own_folders(folder):
        with suppress(OSError):  # it goes while we look
            if not (path / LOCK).is_file():
                continue
            descriptor = os.open(path / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                if not files.is_flocked(descriptor):
                    found.append(path)
            finally:
                os.close(descriptor)
    return found


def kept_records(folder: Path) -> list[Path]:
    """Folders in `folder` that hold nothing but the error record of a job of this user, the newest first."""
    found = []
    for path in _own_folders(folder):
        with suppress(OSError):
            if [entry.name for entry in path.iterdir()] == [FIRST_ERROR]:
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _own_folders(folder: Path) -> list[Path]:
    """What launchers of this user made in `folder`."""
    found: list[Path] = []
    if not hasattr(os, "getuid"):  # Windows has neither owners nor these locks
        return found
    with suppress(OSError):
        for path in folder.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if not path.is_symlink() and path.is_dir() and path.stat().st_uid == os.getuid():
                    found.append(path)
    return found


def _remove(folder: Path) -> None:
    with suppress(OSError):
        record = (folder / FIRST_ERROR).is_file()
        for path in [] if not record else folder.iterdir():
            if path.name != FIRST_ERROR:
                path.unlink()
        if not record:
            shutil.rmtree(folder)
