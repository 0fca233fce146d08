"""Which software a process runs on, as text by name: for reports and bug reports. Standard library only."""

import os
import platform
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata

from cyxjax import __version__
from cyxjax.files import redact

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pydantic", "safetensors")


def software() -> dict[str, str]:
    """Python, system, and the packages training needs; a missing one is "not installed"."""
    found = {"python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})"}
    return found | {"cyxjax": __version__} | {name: version_of(name) or "not installed" for name in PACKAGES}


def machine() -> dict[str, str]:
    """This host: its name, system and cores."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }


def provenance() -> dict[str, str]:
    """How this process was started, and the git commit of its working folder; without what is not known."""
    found = {"command": redact(shlex.join(sys.orig_argv))}
    with suppress(OSError, subprocess.SubprocessError):
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
        found["git commit"] = f"{commit}, {'with changes' if changed else 'clean'}"
    return found


def _git(*words: str) -> str:
    """What git answers. Raises: OSError without git; SubprocessError outside a repository, or after 2 s."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=2, check=True)
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    """The installed version; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
