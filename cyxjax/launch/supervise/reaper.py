"""Nobody outlives the launcher: ranks die with it by the kernel's hand, their children by the reaper's.

The kernel signals a direct child when its parent ends (Linux). What those children started themselves,
such as data workers, is ended by a tiny process that waits for the launcher's end of a pipe to close.
"""

import subprocess
import sys

# Replaces itself by the rank's program; the wish to die with the parent survives exec.
_TETHER = """\
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
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
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
kill = getattr(os, "killpg", os.kill)  # Windows: the rank alone
number = getattr(signal, "SIGKILL", signal.SIGTERM)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        kill(group, number)
    except OSError:  # gone meanwhile
        pass
"""


def tether(command: list[str], parent: int) -> list[str]:
    """`command`, made to die when `parent` does, where the system offers that."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-S", "-E", "-c", _TETHER, str(parent), *command]


class Reaper:
    """Kills the process groups it was told of if this process ends without saying so."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _GUARDIAN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the reaper. Groups still watched are killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
