"""One run folder, one job: a file that the kernel locks for its process, and that names the process."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from cyxjax.checkpoint.folders import make_private
from cyxjax.errors import CheckpointError
from cyxjax.files import flock_now, unflock
from cyxjax.run_folder import LOCK as LOCK

_MAX_OWNER_BYTES = 300
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RunLock:
    """The right to write `run_dir`, until `release`, the end of the `with` block, or this process's death.

    The kernel's lock on the file ends with the process, however it ends. The file stays: if it were removed,
    another job could lock a new one while somebody still holds the old. On a file system without locks
    nothing is locked.
    Raises (from acquire): CheckpointError naming the owner if another job has it, or the folder if it cannot
        be written.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(run_dir)) / LOCK
        self._fd, self._pid = -1, 0

    def acquire(self) -> None:
        """Takes the lock; nothing to do if this object has it."""
        if self._fd != -1:
            return
        make_private(self.path.parent)
        fd = os.open(self.path, _FLAGS, 0o600)
        try:
            if not _locks(fd):
                owner = os.pread(fd, _MAX_OWNER_BYTES, 0).decode(errors="replace")
                raise CheckpointError(
                    f"{self.path.parent} is in use by {owner or 'another process'}. "
                    f"HINT: stop what `fuser {self.path}` lists, or name another folder."
                )
            now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._pid = fd, os.getpid()

    def release(self) -> None:
        """Gives the lock back; a forked child does not give back its parent's."""
        if self._fd == -1:
            return
        if self._pid == os.getpid():
            with suppress(OSError):  # no locks on this file system
                unflock(self._fd)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def _locks(fd: int) -> bool:
    """Whether this process has the lock on `fd` now, or there are none."""
    try:
        return flock_now(fd)
    except OSError:
        return True
