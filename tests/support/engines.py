"""Starts the small job of the fault matrix as an engine would, in a clean environment."""

import os
import subprocess
from pathlib import Path

from cyxjax.launch.group import ports

ROOT = Path(__file__).parents[2]
DONE = "finished 3 steps, start 0, total"


def environment(**extra: object) -> dict[str, str]:
    """A clean environment for a small jax job, with this checkout on the path."""
    dirty = ("NPROC", "OMP_NUM_THREADS")
    clean = {k: v for k, v in os.environ.items() if k not in dirty and not k.startswith("SLURM")}
    base = {"JAX_PLATFORMS": "cpu", "KIND": "jax", "STEPS": "3", "PYTHONPATH": str(ROOT)}
    return clean | base | {name: str(value) for name, value in extra.items()}


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


def free_port() -> int:
    with ports.listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]
