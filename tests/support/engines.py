"""Starts the small job of the fault matrix as an engine does, in a clean environment."""

import subprocess

from tests.support import programs
from tests.support.programs import ROOT

DONE = "finished 3 steps, start 0, total"


def environment(**extra: object) -> dict[str, str]:
    """A clean environment for a small jax job, with this checkout on the path."""
    return programs.environment(**{"KIND": "jax", "STEPS": 3} | extra)


def run(command, limit_s=150, **extra):
    return subprocess.run(
        command,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=ROOT,
        check=False,
    )
