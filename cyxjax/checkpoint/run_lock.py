"""One run folder, one job: a lock file that names its holder and is taken over only after proof of death."""

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cyxjax.errors import CheckpointError
from cyxjax.files import flock, is_flocked, try_flock
from cyxjax.run_folder import LOCK as LOCK


@dataclass(frozen=True)
class Holder:
    """A process, told apart from later ones with its pid, and from ones in other containers or machines."""

    host: str
    machine: str  # digest of the machine id: two machines may share a host name
    boot: str  # after a reboot every pid of before is nobody's
    pid_namespace: str  # a pid says nothing outside its namespace (container)
    pid: int
    process_start: str  # clock ticks since boot, as the kernel counts them; "" where it is not told
    since: str
    token: str

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(
            host=socket.gethostname(),
            machine=hashlib.sha256(_read("/etc/machine-id").encode()).hexdigest()[:16],
            boot=_read("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_link("/proc/self/ns/pid"),
            pid=os.getpid(),
            process_start=_stat_field(os.getpid(), 22),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            token=secrets.token_hex(8),
        )

    @property
    def place(self) -> tuple[str, str, str]:
        """Where its pid means something."""
        return (self.host, self.machine, self.pid_namespace)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def proof_of_death(self, lock_fd: int) -> str:
        """Why this holder cannot be alive, or "" if it is alive or cannot be judged from here.

        `lock_fd`: its lock file, which it keeps flocked while it lives, where the file system has flock.
        """
        me = Holder.this_process()
        if (self.host, self.machine) != (me.host, me.machine):
            return ""
        if self.boot != me.boot:
            return "the machine was restarted since"
        if self.pid_namespace != me.pid_namespace:
            return "" if is_flocked(lock_fd) else "the container it ran in has ended"
        if not _runs(self.pid):
            return "that process is gone"
        if self.process_start != _stat_field(self.pid, 22):
            return "that process is gone; its number belongs to another"
        return ""


def _runs(pid: int) -> bool:
    """Whether `pid` is a process that can still write: a zombie cannot."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return _stat_field(pid, 3) not in ("Z", "X")


def _stat_field(pid: int, number: int) -> str:
    """Field `number` (from 1, as in proc(5)) of a process's stat line; "" where there is none to read."""
    # Field 2 is the name in parentheses and may hold spaces and parentheses itself.
    rest = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return rest[number - 3] if len(rest) > number - 3 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


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
        flock(fd)
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
