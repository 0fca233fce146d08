"""Allows one job per run folder and per checkpoint folder, by a lock file that names the process."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cyxjax.checkpoint.folders import make_private
from cyxjax.errors import CheckpointError
from cyxjax.run_folder import LOCK as LOCK

_MAX_OWNER_BYTES = 300
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A block in which no other job can write to `folder`.

    The kernel releases the lock when the process ends, for any reason. The file remains: if it were removed,
    another job could lock a new file while the old one is still locked. On a file system without locks
    nothing is locked.
    Raises: CheckpointError that names the owner if another job has it, or the folder if it cannot be written.
    """
    path = Path(os.path.abspath(folder)) / LOCK
    make_private(path.parent)
    fd, pid = os.open(path, _FLAGS, 0o600), os.getpid()
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, _MAX_OWNER_BYTES, 0).decode(errors="replace")
            raise CheckpointError(
                f"{path.parent} is in use by {owner or 'another process'}. "
                f"HINT: stop the process that `fuser {path}` lists, or name another folder."
            ) from error
        except OSError:
            pass  # no locks on this file system
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with suppress(OSError):  # a full disk, which saves report
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {pid} on {socket.gethostname()} since {now}".encode(), 0)
        try:
            yield
        finally:
            if os.getpid() == pid:  # a forked child must not release the lock of its parent
                with suppress(OSError):  # no locks on this file system
                    fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
