"""One run folder, one job: a file that the kernel locks for its process, and that names the process."""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cyxjax.checkpoint.folders import make_private
from cyxjax.errors import CheckpointError
from cyxjax.files import flock_now, refuse_special, unflock
from cyxjax.run_folder import LOCK as LOCK

_MAX_LOCK_BYTES = 4096
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a run folder, for people."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started}"


class RunLock:
    """The right to write `run_dir`, until `release`, the end of the `with` block, or this process's death.

    The kernel's lock on the file ends with the process, however it ends: a file that nobody locks is free,
    whatever it says. On a file system without locks a file that is there counts as locked.
    Raises (from acquire): CheckpointError naming the owner if another job has it.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(run_dir)) / LOCK
        self._fd, self._pid = -1, 0

    def acquire(self) -> None:
        """Takes the lock; nothing to do if this object has it."""
        if self._fd != -1:
            return
        make_private(self.path.parent)
        while (fd := self._open_locked()) is None:
            pass  # its owner ended and removed the file between our opening and locking it
        try:
            os.ftruncate(fd, 0)
            now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            os.pwrite(fd, json.dumps(asdict(LockOwner(socket.gethostname(), os.getpid(), now))).encode(), 0)
            os.fsync(fd)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            os.close(fd)
            raise CheckpointError(
                f"{self.path}: {error.strerror}. HINT: free space there, or name another run_dir."
            ) from error
        self._fd, self._pid = fd, os.getpid()

    def _open_locked(self) -> int | None:
        """A descriptor of the lock file, locked; None where the file is no longer the one of that name."""
        fd = self._open()
        try:
            if not flock_now(fd):
                owner = read_owner(self.path)
                raise CheckpointError(
                    f"{self.path.parent} is in use by {owner or 'another process'}. "
                    f"HINT: stop what `fuser {self.path}` lists, or name another folder."
                )
            is_same = os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            is_same = False
        except OSError as error:
            owner = read_owner(self.path)
            if owner is None:  # nobody has written into it: it is this job's
                return fd
            os.close(fd)
            raise CheckpointError(
                f"{self.path.parent} may be in use by {owner}: this file system has no locks "
                f"({error.strerror}). HINT: once no job runs in the folder, delete {self.path}."
            ) from error
        except BaseException:
            os.close(fd)
            raise
        if is_same:
            return fd
        os.close(fd)
        return None

    def _open(self) -> int:
        try:
            if self.path.is_symlink() or self.path.exists():
                refuse_special(self.path)
            return os.open(self.path, _FLAGS, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: {error.strerror}. HINT: expected a plain file in a folder this user may write."
            ) from error

    def release(self) -> None:
        """Gives the lock back and removes the file; a forked child does not give back its parent's."""
        if self._fd == -1:
            return
        if self._pid == os.getpid():
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                    self.path.unlink()
            with suppress(OSError):  # no locks on this file system
                unflock(self._fd)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def read_owner(path: Path) -> LockOwner | None:
    """Who wrote the lock file at `path`; None where it names nobody."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = json.loads(os.pread(fd, _MAX_LOCK_BYTES, 0))
        return LockOwner(str(found["host"]), int(found["pid"]), str(found.get("started", found.get("since"))))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    finally:
        os.close(fd)
