"""Processes of this host: what the kernel shows of them, and how a job's processes end with its launcher.

/proc shows parent, state and start time. The kernel signals a direct child when its parent ends. What those
children started themselves, such as data workers, is ended by a small process that waits until the launcher's
end of a pipe is closed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")


@dataclass(frozen=True)
class Stat:
    """parent: a pid. is_stopped: by SIGSTOP, Ctrl-Z or a debugger. start: in ticks since the boot."""

    parent: int
    is_stopped: bool
    start: str
    resident_bytes: int


def stat(pid: int, processes: Path = PROC) -> Stat | None:
    """What the kernel shows of `pid`; None for a process that has ended, or without /proc."""
    try:
        fields = (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()
        resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return None if fields[0] == "Z" else Stat(int(fields[1]), fields[0] in "Tt", fields[19], resident)
    except (OSError, IndexError, ValueError):
        return None


def identity(pid: int, processes: Path = PROC) -> str:
    """A name of the process `pid` that no later process with the same number has."""
    found = stat(pid, processes)
    return f"{pid}:{found.start if found else ''}"


# Replaces itself by the rank's program; the setting to die with the parent survives exec, and so does that to
# ignore SIGUSR1 (checkpoint now) and SIGUSR2 (stacks), which would end a program that does not handle them.
_TETHER = """\
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
if os.getppid() != parent:
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""

# Reads "+pgid" and "-pgid" lines; when the pipe closes, kills the groups that are left.
_GUARDIAN = """\
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:  # gone meanwhile
        pass
"""


def start(command: list[str], env: dict[str, str]) -> Any:
    """The Popen of `command` in a session of its own, with pipes for its output; it dies with this process.

    It gets SIGUSR1 only once the tether has made it harmless.
    """
    with _blocked({signal.SIGUSR1}):
        return subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _TETHER, str(os.getpid()), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Blocks `signals`, also in processes that are started in the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Reaper:
    """The helper process: kills the process groups that are watched when this process ends.

    It gets no signal that can be blocked, such as those that a scheduler sends to all processes of a job.
    """

    def __init__(self) -> None:
        with _blocked(signal.valid_signals()):
            self._process: Any = subprocess.Popen(  # with its input
                [sys.executable, "-S", "-E", "-c", _GUARDIAN],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )

    def watch(self, group: int) -> None:
        self._send(f"+{group}\n")

    def release(self, group: int) -> None:
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the helper. Groups still watched are killed."""
        self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        with suppress(OSError):  # it was killed: the kernel still ends the ranks
            self._process.stdin.write(line.encode())
