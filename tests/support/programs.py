"""Starts the programs of the guides as a user would, and reads the report of each rank."""

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
    """The reports of a program's ranks, by rank, and what they printed, together."""

    reports: list[dict[str, Any]]
    printed: str

    def every(self, name: str) -> Any:
        """The value that all ranks reported under `name`; it must be the same."""
        values = [report[name] for report in self.reports]
        assert all(value == values[0] for value in values), (name, values)
        return values[0]


def launch(program: Path, folder: Path, *flags: str, nproc: int = 2, **variables: object) -> Ranks:
    """Runs `program FOLDER` under our launcher."""
    command = ["-m", "cyxjax.launch", *(flags or ("--nproc-per-node", str(nproc))), program, folder]
    return read([run(*command, **variables)], folder, nproc)


def by_hand(program: Path, folder: Path, nproc: int = 2, **variables: object) -> Ranks:
    """Runs `RANK=r WORLD_SIZE=n python program FOLDER` for every rank, as in one terminal per rank."""
    ranks = [([program, folder], place) for place in environments(nproc, **variables)]
    return read(forked.run_all(ranks, LIMIT_S), folder, nproc)


def run(*command: object, cwd: Path | None = None, **variables: object) -> subprocess.CompletedProcess[str]:
    """Runs `python COMMAND` to its end."""
    return forked.run(command, environment(**variables), LIMIT_S, cwd)


def printed_by(*command: object, cwd: Path | None = None, **variables: object) -> str:
    """The standard output of `python COMMAND`, which must succeed."""
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fresh(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `run`, but in a fresh interpreter with the environment of this process.

    options: of `subprocess.run`.
    """
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)


def environment(**variables: object) -> dict[str, str]:
    """The environment of a user: this process's without the variables that the tests set."""
    ours = ("NPROC", "OMP_NUM_THREADS", "JAX_NUM_CPU_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT} | variables
    return kept | {name: str(value) for name, value in own.items()}


def environments(nproc: int, **variables: object) -> list[dict[str, str]]:
    """The environment of each of `nproc` ranks that are started by hand, with one free port."""
    place = {"WORLD_SIZE": nproc, "MASTER_PORT": free_port()} | variables
    return [environment(RANK=rank, **place) for rank in range(nproc)]


def report(folder: str | Path, rank: int, values: dict[str, Any]) -> None:
    """Called by a program: writes the values of this rank for the test, as JSON."""
    path = Path(folder) / f"report_{rank}.json"
    path.write_text(json.dumps(values))


def free_port() -> int:
    """A port for a rank to listen on, which neither the system nor another test process hands out.

    A socket that does not listen reserves it: other calls of `free_port` avoid it, but a rank, which reuses
    addresses, can bind it.
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


_PORTS = cycle(range(10_000, 32_000))  # below the ephemeral ports
_HELD: deque[socket.socket] = deque()
atexit.register(lambda: [held.close() for held in _HELD])


def read(ended: list[subprocess.CompletedProcess[str]], folder: Path, nproc: int) -> Ranks:
    """The reports in `folder` of the ranks of a finished program."""
    printed = "".join(done.stdout + done.stderr for done in ended)
    assert all(done.returncode == 0 for done in ended), printed
    return Ranks([json.loads((folder / f"report_{rank}.json").read_text()) for rank in range(nproc)], printed)
