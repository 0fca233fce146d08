"""Starts the guides' programs as a user would, and reads what each rank reports."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import forked

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


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
    """A port that no other worker's tests are given, nor the system hands out before a rank listens on it."""
    while True:
        with socket.socket() as held, suppress(OSError):
            held.bind(("127.0.0.1", next(_PORTS)))
            return held.getsockname()[1]


def _ports_of(worker: str) -> Iterator[int]:
    """500 ports each for workers gw0 to gw31, below those that systems hand out; again from the start."""
    first = 10_000 + 500 * (int(worker.removeprefix("gw") or 0) % 32)
    return cycle(range(first, first + 500))


_PORTS = _ports_of(os.environ.get("PYTEST_XDIST_WORKER", ""))


def read(ended: list[subprocess.CompletedProcess[str]], folder: Path, nproc: int) -> Ranks:
    """What the ranks of a program that has ended, as `ended`, reported in `folder`."""
    printed = "".join(done.stdout + done.stderr for done in ended)
    assert all(done.returncode == 0 for done in ended), printed
    return Ranks([json.loads((folder / f"report_{rank}.json").read_text()) for rank in range(nproc)], printed)
