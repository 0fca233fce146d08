"""The launcher's folder under the temporary directory: heartbeats, error files and stacks of its ranks.

Cleaners of temporary files may remove it while a job runs. What a killed launcher left is removed by the next
launcher; of the folders with errors of jobs without --log-dir, the newest are kept.
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
ERRORS = f"{PREFIX}error-"  # of a folder for the error of a job without --log-dir
KEPT_RECORDS = 5


class Scratch:
    """A new folder at `path`, locked while this process lives."""

    def __init__(self) -> None:
        _tidy(Path(tempfile.gettempdir()))
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._take()

    def ensure(self) -> None:
        """Creates the folder again, with a line, if it was removed. Raises: OSError."""
        if os.path.isdir(self.path):
            return
        old = self._lock
        os.mkdir(self.path, 0o700)  # where the ranks look; not one that another user has put there meanwhile
        self._take()
        os.close(old)
        output.say(
            f"{self.path} was removed while the job was running and was created again. "
            f"HINT: keep cleaners off {PREFIX}*, or set TMPDIR to a folder that they do not clean."
        )

    def clear(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _take(self) -> None:
        """Locks the folder. The lock file gets its name when it is held, so that no process sees it free."""
        draft = os.path.join(self.path, f"{LOCK}.new")
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        files.try_flock(self._lock)
        os.replace(draft, os.path.join(self.path, LOCK))


def _tidy(folder: Path) -> None:
    """Removes what this user's ended launchers left in `folder`, and the older errors."""
    errors: list[tuple[int, Path]] = []
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it was removed meanwhile
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            if path.name.startswith(ERRORS):
                if [entry.name for entry in path.iterdir()] in ([], [FIRST_ERROR]):
                    errors.append((path.stat().st_mtime_ns, path))
            elif _is_free(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)
    for _, path in sorted(errors, reverse=True)[KEPT_RECORDS:]:
        shutil.rmtree(path, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    """Raises: OSError for a folder of another program, which has no such file."""
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        # Shared, so that two processes that look at the same moment do not take each other for the owner.
        return files.try_flock(descriptor, shared=True)
    finally:
        os.close(descriptor)
