"""Processes of this host as the kernel shows them in /proc: parent, state and start time. Linux only."""

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Stat:
    """parent: a pid. is_stopped: by SIGSTOP, Ctrl-Z or a debugger. start: in ticks since the boot."""

    parent: int
    is_stopped: bool
    start: str


def stat(pid: int, processes: Path = PROC) -> Stat | None:
    """What the kernel shows of `pid`; None for a process that has ended, or without /proc."""
    try:
        fields = (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return Stat(int(fields[1]), fields[0] in "Tt", fields[19])
    except (OSError, IndexError, ValueError):
        return None


def identity(pid: int, processes: Path = PROC) -> str:
    """A name of the process `pid` that no later process with the same number has."""
    found = stat(pid, processes)
    return f"{pid}:{found.start if found else ''}"
