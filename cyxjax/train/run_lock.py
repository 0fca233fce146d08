"""One run folder, one job: a lock file that names its holder and is taken over only after proof of death."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cyxjax.errors import CheckpointError
from cyxjax.train.lock_holder import Holder, try_flock

LOCK = "run.lock"
_MAX_LOCK_BYTES = 4096


class RunLock:
    """The right to write `run_dir`, until `release`, the end of the `with` block, or this process's death.

    Raises (from acquire): CheckpointError naming the holder if another job has it and may be alive.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(run_dir)) / LOCK
        self._holder: Holder | None = None
        self._fd = -1

    def acquire(self) -> str:
        """Take the lock. Says what was taken over from whom; "" if the lock was free or is ours already."""
        if self._holder is not None:
            return ""
        _make_folder(self.path.parent)
        me, taken_over = Holder.this_process(), ""
        while (fd := _create(self.path, me)) is None:
            taken_over = _take_away(self.path)
        self._holder, self._fd = me, fd
        return taken_over

    def release(self) -> None:
        """Give the lock back. Another job's is left alone; a forked child never gives its parent's back."""
        if self._holder is None:
            return
        if self._holder.pid == os.getpid() and read_holder(self.path) == self._holder:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._holder, self._fd = None, -1

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None if nobody does.

    Raises: CheckpointError if the file is a link or is not a lock of ours.
    """
    fd = _open(path)
    if fd is None:
        return None
    try:
        return _parse(path, fd)
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: {error.strerror}. HINT: name a folder this user may write."
        ) from error


def _create(path: Path, holder: Holder) -> int | None:
    """An open, flocked descriptor of the lock, now `holder`'s; None if the name was taken.

    Written under a name of its own and then linked: the link fails if the lock exists, and nobody ever
    reads half of one.
    """
    own = path.with_name(f"{LOCK}.{holder.token}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(own, flags, 0o600)
    except OSError as error:
        raise CheckpointError(f"{own}: {error.strerror}. HINT: name a folder this user may write.") from error
    try:
        try_flock(fd)
        os.write(fd, json.dumps(asdict(holder)).encode())
        os.fsync(fd)
        os.link(own, path)
    except BaseException as error:
        os.close(fd)
        if not isinstance(error, FileExistsError):
            raise
        return None
    finally:
        own.unlink(missing_ok=True)
    return fd


def _take_away(path: Path) -> str:
    """Remove a dead holder's lock; what was done, in words. Raises: CheckpointError if it may live."""
    with _one_at_a_time(path.parent):
        fd = _open(path)
        if fd is None:
            return ""  # released or taken away since we looked
        try:
            holder = _parse(path, fd)
            proof = holder.proof_of_death(fd)
        finally:
            os.close(fd)
        if not proof:
            raise CheckpointError(f"{path.parent} is in use by {holder}. {_hint(holder)}")
        path.unlink()
    return f"took over {path.parent} from {holder}: {proof}"


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Jobs that all see one dead holder enter one after the other: else the second would remove the lock
    that the first has just made. The kernel ends this hold with the process, so it cannot be left behind."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _flock(fd, folder)
        yield
    finally:
        os.close(fd)


def _flock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no locks on this file system ({error.strerror}), so a dead job cannot be told from a "
            f"living one. HINT: once no job runs in it, delete {LOCK}."
        ) from error


def _hint(holder: Holder) -> str:
    if holder.place == Holder.this_process().place:
        return "HINT: name another folder, or stop that process first."
    return f"Whether it lives cannot be seen from here. HINT: once nothing runs there, delete {LOCK}."


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}. HINT: it should be a plain file; remove it."
        ) from error


def _parse(path: Path, fd: int) -> Holder:
    try:
        raw: dict[str, Any] = json.loads(os.pread(fd, _MAX_LOCK_BYTES, 0))
        holder = Holder(**{f.name: raw[f.name] for f in fields(Holder)})
        if any(type(getattr(holder, f.name)) is not f.type for f in fields(Holder)) or holder.pid < 1:
            raise ValueError("a field has the wrong type")
        return holder
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a lock that cyxjax wrote: {ascii(str(error)[:200])}. "
            "HINT: remove it if no job is running in this folder."
        ) from error
