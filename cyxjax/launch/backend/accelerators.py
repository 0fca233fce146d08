"""Accelerators that are no NVIDIA GPU, found by the signs they leave on a host; jax is not loaded for it.

None of them is trained on yet. What must not happen is that a host with one trains on its CPU and says
nothing, each host of a pod alone.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_GOOGLE = "0x1ae0"
# As jax's own hardware_utils has them (a test compares): v2 to v8.
_TPU_DEVICES = frozenset(
    {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083"}
)
Installed = Callable[[str], bool]


@dataclass(frozen=True)
class Accelerator:
    """One kind of device on this host."""

    name: str
    sign: str  # what was seen
    platform: str  # jax's name for it
    ready: bool  # whether jax would use it: a host is for it, or its plugin was installed on purpose


def installed(package: str) -> bool:
    """Whether Python finds `package`; in the namespace `jax_plugins` a part of a name is enough."""
    if package.startswith("jax_plugins."):
        spec = importlib.util.find_spec("jax_plugins")
        folders = (spec and spec.submodule_search_locations) or ()
        part = package.partition(".")[2]
        return any(part in entry.name for folder in folders for entry in _entries(Path(folder)))
    return importlib.util.find_spec(package) is not None


def found(root: str = "/", has: Installed = installed) -> list[Accelerator]:
    """What this host has besides NVIDIA GPUs; root: where its /dev and /sys lie."""
    return [*_tpu(Path(root), has), *_amd(Path(root), has), *_metal(has)]


def _tpu(root: Path, has: Installed) -> Iterator[Accelerator]:
    nodes = [
        entry for entry in _entries(root / "dev") if entry.name.startswith("accel") and not entry.is_dir()
    ]
    for device in _entries(root / "sys/bus/pci/devices"):
        if _text(device / "vendor") == _GOOGLE and _text(device / "device") in _TPU_DEVICES:
            nodes.append(device)
    # vfio passes through any device; only with the TPU's library is it taken for one.
    nodes += [entry for entry in _entries(root / "dev/vfio") if entry.name.isdigit() and has("libtpu")]
    if nodes:
        yield Accelerator("TPU", "/" + str(nodes[0].relative_to(root)), "tpu", True)


def _amd(root: Path, has: Installed) -> Iterator[Accelerator]:
    """An AMD GPU: a node of the compute driver that has SIMD units (its other nodes are CPUs)."""
    if not (root / "dev/kfd").exists():
        return
    nodes = _entries(root / "sys/class/kfd/kfd/topology/nodes")
    units = [line.split() for node in nodes for line in _text(node / "properties").splitlines()]
    if not nodes or any(unit[:1] == ["simd_count"] and unit[-1] != "0" for unit in units):
        yield Accelerator("AMD GPU", "/dev/kfd", "rocm", has("jax_plugins.rocm"))


def _metal(has: Installed) -> Iterator[Accelerator]:
    if has("jax_plugins.metal"):  # jax takes it without being asked
        yield Accelerator("Apple GPU", "the package jax-metal", "METAL", True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
