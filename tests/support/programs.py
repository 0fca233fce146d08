"""Starts the guides' programs as a user would, and reads what each rank reports."""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections import deque
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import forked
from tests.support.places import ROOT

LIMIT_S = 240


class Ranks(NamedTuple):
    """What a program's ranks reported (by rank) and printed (together)."""

    reports: list[dict[str, Any]]
    printed: str

    def every(self, name: str) -> Any:
        """What all ranks reported alike under `name`."""
        values = [report[name] for report in self.reports]
        assert all(value == values[0] for value in values), (name, values)
        return values[0]


def launch(program: Path, folder: Path, *flags: str, nproc: int = 2, **variables: str) -> Ranks:
    """Runs `program FOLDER` under our launcher."""
    command = ["-m", "cyxjax.launch", *(flags or ("--nproc-per-node", str(nproc))), program, folder]
    return read([run(*command, **variables)], folder, nproc)


def by_hand(program: Path, folder: Path, nproc: int = 2, **variables: str) -> Ranks:
    """Runs `RANK=r WORLD_SIZE=n python program FOLDER` for every rank, as in as many terminals."""
    port = str(free_port())
    places = [{"RANK": str(r), "WORLD_SIZE": str(nproc), "MASTER_PORT": port} for r in range(nproc)]
    ranks = [([program, folder], environment(**place, **variables)) for place in places]
    return read(forked.run_all(ranks, LIMIT_S), folder, nproc)


def run(*command: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python COMMAND` to its end."""
    return forked.run(command, environment(**variables), LIMIT_S, cwd)


def printed_by(*command: object, cwd: Path | None = None, **variables: str) -> str:
    """What `python COMMAND` says on its standard output; it must succeed."""
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fresh(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `run`, but by an interpreter that has loaded nothing, in this process's environment.

    options: of `subprocess.run`.
    """
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)


def environment(**variables: str) -> dict[str, str]:
    """A user's environment: this process's without what tests set for themselves."""
    ours = ("NPROC", "OMP_NUM_THREADS", "JAX_NUM_CPU_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables


def report(folder: str | Path, rank: int, values: dict[str, Any]) -> None:
    """Called by a program: what the test is to know of this rank, as JSON."""
    path = Path(folder) / f"report_{rank}.json"
    path.write_text(json.dumps(values))


def free_port() -> int:
    """A port for a rank to listen on, which neither the system nor a process of these tests gives to another.

    A socket that does not listen holds it: it keeps out `free_port` elsewhere, but not a rank, which reuses
    addresses.
    """
    if len(_HELD) == 100:
        _HELD.popleft().close()
    while True:
        _HELD.append(socket.socket())
        try:
            _HELD[-1].bind(("127.0.0.1", next(_PORTS)))
        except OSError:
            _HELD.pop().close()
        else:
            _HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return _HELD[-1].getsockname()[1]


_PORTS = cycle(range(10_000, 32_000))  # below those that systems hand out
_HELD: deque[socket.socket] = deque()
atexit.register(lambda: [held.close() for held in _HELD])


def read(ended: list[subprocess.CompletedProcess[str]], folder: Path, nproc: int) -> Ranks:
    """What the ranks of a program that has ended, as `ended`, reported in `folder`."""
    printed = "".join(done.stdout + done.stderr for done in ended)
    assert all(done.returncode == 0 for done in ended), printed
    return Ranks([json.loads((folder / f"report_{rank}.json").read_text()) for rank in range(nproc)], printed)
