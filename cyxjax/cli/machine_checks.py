"""The checks of one machine: versions, devices, threads, memory pages, ports, disk."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyxjax.launch import environment
from cyxjax.launch.backend import pages
from cyxjax.launch.program import PACKAGES, version_of
from cyxjax.launch.topology import DEFAULT_PORT

_EXTRAS = {
    "scikit-learn": "digits",
    "matplotlib": "plot",
    "wandb": "wandb",
    "trackio": "trackio",
    "tensorboardX": "tensorboard",
    "mlflow-skinny": "mlflow",
}
_DEVICE_TIMEOUT_S = 60  # jax can hang on a broken driver, so it is started in a child process
_LOW_DISK_BYTES = 1 << 30
_ASK_JAX = (
    "import json, jax; d = jax.local_devices(); "
    "print(json.dumps([jax.default_backend(), len(d), d[0].device_kind, float(jax.numpy.ones(8).sum())]))"
)


@dataclass(frozen=True)
class Check:
    """The result of one check; `level` says whether it prevents training."""

    level: Literal["ok", "warn", "FAIL"]
    topic: str
    found: str  # a `warn` or `FAIL` ends with a HINT

    def line(self) -> str:
        """`ok    disk      12.3 GB free in /runs`."""
        return f"{self.level:5} {self.topic:9} {self.found}"


def machine_checks(env: Mapping[str, str], folder: Path) -> Iterator[Check]:
    """Yields each check, in the order in which a run would need them."""
    yield from versions()
    yield devices()
    yield threads()
    yield memory_pages(env)
    yield port(DEFAULT_PORT)
    yield disk(folder)


def versions() -> Iterator[Check]:
    """Python, the packages training needs, and the optional ones."""
    python = f"python {'.'.join(map(str, sys.version_info[:3]))} on {sys.platform}"
    yield Check("ok", "version", python)
    for name in PACKAGES:
        found = version_of(name)
        hint = f"{name} is missing. HINT: pip install cyxjax"
        yield Check("ok", "version", f"{name} {found}") if found else Check("FAIL", "version", hint)
    for name, extra in _EXTRAS.items():
        found = version_of(name) or f"not installed; optional: pip install 'cyxjax[{extra}]'"
        yield Check("ok", "version", f"{name} {found}")


def devices(program: str = _ASK_JAX, timeout_s: float = _DEVICE_TIMEOUT_S) -> Check:
    """The devices that jax uses, after one test sum on them, in a child process."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        platform, count, kind, total = json.loads(child.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Check("FAIL", "devices", f"jax did not start in {timeout_s:g} s. HINT: try JAX_PLATFORMS=cpu.")
    except (subprocess.CalledProcessError, ValueError, IndexError) as err:
        output = (getattr(err, "stderr", "") or str(err)).strip().splitlines()
        return Check(
            "FAIL",
            "devices",
            f"jax does not start: {output[-1] if output else err}. HINT: pip install cyxjax",
        )
    if total != 8.0:
        return Check("FAIL", "devices", f"8 ones add up to {total} on {kind}. HINT: update its driver.")
    return Check("ok", "devices", f"{count} x {kind} ({platform}); a sum on it is correct")


def threads() -> Check:
    """Cores this process may use."""
    return Check(
        "ok", "threads", f"{environment.thread_share(1)} of {os.cpu_count()} cores are usable by this process"
    )


def memory_pages(env: Mapping[str, str]) -> Check:
    """The memory pages of processes on CPUs, and whether the kernel provides huge pages."""
    refusal = pages.refused_by_kernel(env)
    return Check("warn", "pages", refusal) if refusal else Check("ok", "pages", pages.described(env, 1))


def port(number: int) -> Check:
    """Whether the default meeting port is free on this host."""
    try:
        socket.create_server(("", number)).close()  # as a job listens: a port in TIME_WAIT is free
    except OSError as err:
        hint = "HINT: set MASTER_PORT, or use --standalone."
        return Check("warn", "port", f"{number} (the default MASTER_PORT) is taken: {err.strerror}. {hint}")
    return Check("ok", "port", f"{number} (the default MASTER_PORT) is free")


def disk(folder: Path, low_bytes: int = _LOW_DISK_BYTES) -> Check:
    """Free space where runs would be written, and whether the folder is writable."""
    free_bytes = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("FAIL", "disk", f"{folder} is not writable. HINT: set run_dir to a folder that is.")
    text = f"{free_bytes / 1e9:.1f} GB free in {folder}"
    if free_bytes < low_bytes:
        return Check("warn", "disk", f"{text}. HINT: checkpoints need space; set run_dir to another disk.")
    return Check("ok", "disk", text)
