"""One run folder, one job: a lock file that names its holder and is taken over only after proof of death."""

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from cyxjax.checkpoint.folders import make_private
from cyxjax.checkpoint.holder import Holder as Holder
from cyxjax.errors import CheckpointError
from cyxjax.files import flock_now, try_flock, unflock
from cyxjax.run_folder import LOCK as LOCK

_MAX_LOCK_BYTES = 4096
_OTHERS_S = 2.0  # for which a job that looks at a free folder may hold it


class RunLock:
    """The right to write `run_dir`, until `release`, the end of the `with` block, or this process's death.

    Two things say so: the lock file, which names the holder to people and to other machines, and the kernel's
    lock on the folder itself, which goes with the process and which nobody can delete. A free one is the
    proof that no job of this machine is in the folder, whatever became of the file.
    Raises (from acquire): CheckpointError naming the holder if another job has it and may be alive.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(run_dir)) / LOCK
        self._holder: Holder | None = None
        self._fd = self._folder = -1

    def acquire(self) -> str:
        """Take the lock. Says what was taken over from whom; "" if the lock was free or is ours already."""
        if self._holder is not None:
            return ""
        make_private(self.path.parent)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        me, taken_over = Holder.this_process(), ""
        try:
            can_lock = _enter(folder, self.path)
            while (fd := _create(self.path, me)) is None:
                taken_over = _take_away(self.path, can_lock)
        except BaseException:
            os.close(folder)
            raise
        self._holder, self._fd, self._folder = me, fd, folder
        return taken_over

    def check(self) -> str:
        """Whether the folder is still this job's: what was wrong and put right, in words; "" if nothing was.

        Raises: CheckpointError if what it would write to is gone, is another folder or another job's.
        """
        folder = self.path.parent
        try:
            there = os.stat(folder)
        except FileNotFoundError:
            there = None
        mine = os.fstat(self._folder)
        if there is None or not os.path.samestat(there, mine):
            what = "deleted" if there is None else "replaced by another folder or link"
            raise CheckpointError(
                f"{folder} was {what} under this job, which would write where nobody looks, or where "
                "another job does. HINT: leave a run's folder alone while it runs; run the command again to "
                "begin anew."
            )
        try:
            found = read_holder(self.path)
        except CheckpointError:  # a link, or no lock of ours: in a folder that the kernel holds for this job
            self.path.unlink(missing_ok=True)
            found = None
        if found == self._holder:
            return ""
        if found is not None:
            raise CheckpointError(f"{folder} is now in use by {found} too. {_hint(found)}")
        return self._write_again()

    def _write_again(self) -> str:
        assert self._holder is not None
        fd = _create(self.path, replace(self._holder, token=secrets.token_hex(8)))
        if fd is None:
            return ""  # looked at again at the next check
        os.close(self._fd)
        self._fd, self._holder = fd, read_holder(self.path)
        return (
            f"WARNING: {self.path} was deleted or overwritten under this job. It was written again; the "
            "kernel kept other jobs of this machine out. HINT: to end a job, stop its process."
        )

    def release(self) -> None:
        """Give the lock back. Another job's is left alone; a forked child never gives its parent's back."""
        if self._holder is None:
            return
        if self._holder.pid == os.getpid():
            if _still(self.path, self._holder):
                self.path.unlink(missing_ok=True)
            with suppress(OSError):  # no locks on this file system
                unflock(self._folder)
        os.close(self._fd)
        os.close(self._folder)
        self._holder, self._fd, self._folder = None, -1, -1

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


def _still(path: Path, holder: Holder) -> bool:
    try:
        return read_holder(path) == holder
    except CheckpointError:
        return False


def _enter(folder: int, path: Path) -> bool:
    """Holds the open `folder` for this process; False where the file system has no locks.

    Raises: CheckpointError if a job of this machine has it, also one whose lock file was deleted.
    """
    until = time.monotonic() + _OTHERS_S
    while True:
        try:
            if flock_now(folder):
                return True
        except OSError:
            return False
        holder, dead = read_holder(path), ""
        if holder is not None:
            dead = _proof(path, holder)
            if not dead:
                raise CheckpointError(f"{path.parent} is in use by {holder}. {_hint(holder)}")
        if time.monotonic() > until:  # others that found it free let go, or have written their name, by now
            who = "a job whose lock file was deleted" if holder is None else f"what {holder} started ({dead})"
            raise CheckpointError(
                f"{path.parent} is in use by {who}: the kernel holds the folder for it. "
                f"HINT: `fuser {path.parent}` names the process; stop it first."
            )
        time.sleep(0.05)


def _proof(path: Path, holder: Holder) -> str:
    fd = _open(path)
    if fd is None:
        return "its lock is gone"
    try:
        return holder.proof_of_death(fd)
    finally:
        os.close(fd)


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
    except FileExistsError:
        os.close(fd)
        return None
    except OSError as error:  # no room, or a folder that does not take links
        os.close(fd)
        raise CheckpointError(
            f"{path}: {error.strerror}. HINT: free space there, or name another run_dir."
        ) from error
    except BaseException:
        os.close(fd)
        raise
    finally:
        own.unlink(missing_ok=True)
    return fd


def _take_away(path: Path, can_lock: bool) -> str:
    """Remove a dead holder's lock; what was done, in words. Raises: CheckpointError if it may live.

    Called while the folder is held: jobs that all see one dead holder enter one after the other, else the
    second would remove the lock that the first has just made.
    """
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
    if not can_lock:
        raise CheckpointError(
            f"{path.parent}: no locks on this file system, so a dead job cannot be told from a living one. "
            f"HINT: once no job runs in it, delete {LOCK}."
        )
    path.unlink()
    return f"took over {path.parent} from {holder}: {proof}"


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
