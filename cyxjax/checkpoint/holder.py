"""Who holds a run folder: a process that can be told from later ones, and from ones elsewhere."""

import hashlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from cyxjax.files import is_flocked


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
