"""Which software a process runs on, as text by name: for reports and bug reports. Standard library only."""

import os
import platform
import socket
import sys
from importlib import metadata

from cyxjax import __version__

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


def version_of(package: str) -> str | None:
    """The installed version; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
