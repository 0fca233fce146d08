"""Starts the launcher on rank.py under a hard time limit, and checks that no process is left behind."""

import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import forked
from tests.support.forked import FRESH
from tests.support.forked_ranks import name_of
from tests.support.programs import environment
from tests.support.waiting import until

RANK = Path(__file__).with_name("rank.py")
# Prefix of a command that starts with a signal ignored, as under nohup.
IGNORING = (
    sys.executable,
    "-c",
    "import os, signal as s, sys; s.signal(int(sys.argv[1]), s.SIG_IGN); os.execv(sys.argv[2], sys.argv[2:])",
)
LIMIT_S = 100  # for a run that takes seconds: the machine may be shared


@dataclass
class Run:
    """A started launcher. `first` is its first_error.json, {} if it has none."""

    process: forked.Program
    run_id: str
    log_dir: Path
    out: str = ""
    err: str = ""

    @property
    def code(self) -> int:
        return self.process.returncode

    @property
    def first(self) -> dict:
        path = self.log_dir / "first_error.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def log(self, rank: int, start: int = 0) -> str:
        path = self.log_dir / f"start_{start}" / f"rank_{rank}.log"
        return path.read_bytes().decode() if path.exists() else ""

    def wait(self, limit_s: float = LIMIT_S) -> "Run":
        """Waits for the end; after the limit the test fails, and the launcher is killed at its end."""
        self.out, self.err = self.process.communicate(timeout=limit_s)
        return self

    def survivors(self) -> list[int]:
        """Live processes of this run, found by the run id in their environment.

        Forked ranks have it in their process name.
        """
        found = [one.info for one in psutil.process_iter(["pid", "status", "environ", "name"])]
        alive = [one for one in found if one["status"] != psutil.STATUS_ZOMBIE]
        started = [one for one in alive if (one["environ"] or {}).get("CYXJAX_RUN_ID") == self.run_id]
        forks = [one for one in alive if one["name"] == name_of(self.run_id)]
        return [one["pid"] for one in (*started, *forks)]

    def no_survivors_within(self, seconds: float) -> bool:
        return until(lambda: not self.survivors(), seconds)

    def logged(self, text: str, seconds: float = 90) -> bool:
        """True once `text` is on the launcher's standard error."""
        return self.process.complains(text, seconds)

    def reached(self, text: str, rank: int, seconds: float = 90) -> bool:
        """True once `text` is in the log of `rank`."""
        return until(lambda: text in self.log(rank), seconds)


def start(
    log_dir: Path,
    nproc: int = 3,
    *flags: str,
    script: Path = RANK,
    wrap: tuple[str, ...] = (),
    fork: bool = False,
    **env: object,
) -> Run:
    """Starts the launcher, with the prefix `wrap`; `env` is added to the environment, numbers as text.

    fork: the launcher and its ranks are forks with jax loaded, for tests that are not about their start.
    """
    run_id = f"test-{secrets.token_hex(6)}"
    words = ["-m", "cyxjax.launch", "--nproc-per-node", str(nproc), "--log-dir", str(log_dir)]
    words += ["--run-id", run_id, *flags, str(script)]
    full = environment(**{"TMPDIR": log_dir} | env)
    return Run(forked.Program(words, full, fresh=() if fork else (*wrap, *FRESH)), run_id, log_dir)


def under_way(log_dir: Path, nproc: int = 2, *flags: str, **options: object) -> Run:
    """A run of rank.py in which all ranks train until the test ends it; arguments as in `start`."""
    run = start(log_dir, nproc, *flags, **({"KIND": "light", "STEPS": 100_000} | options))
    assert all(run.reached("under way", rank) for rank in range(nproc)), run.log_dir
    return run


def launch(
    log_dir: Path, nproc: int = 3, *flags: str, limit_s: float = LIMIT_S, fork: bool = False, **env: object
) -> Run:
    """Runs the launcher to its end and checks that no process of the run is left."""
    run = start(log_dir, nproc, *flags, fork=fork, **env).wait(limit_s)
    assert run.no_survivors_within(30), run.err
    return run
