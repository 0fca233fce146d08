"""Which wires the collectives use: nccl between NVIDIA GPUs, gloo everywhere else."""

import os
import re
from collections.abc import Mapping

from cyxjax.errors import ConfigError, GroupError

CPU_HINT = "HINT: set DISTRIBUTED_BACKEND=cpu (backend='gloo') to train on the CPU with the same program."


def choose(name: str, platform: str, has_gpu: bool) -> str:
    """'nccl' or 'gloo' for a wish ('auto', 'nccl', 'gloo', 'cpu') on `platform` (sys.platform's spelling).

    Raises: GroupError when nccl is asked for where it cannot be; ConfigError for an unknown name.
    """
    if name in ("gloo", "cpu"):
        return "gloo"
    if name not in ("auto", "nccl"):
        raise ConfigError(f"Backend {name!r} is unknown; expected auto, nccl, gloo or cpu. {CPU_HINT}")
    can_nccl = has_gpu and platform != "win32"  # NVIDIA ships no NCCL for Windows
    if name == "nccl" and not can_nccl:
        raise GroupError(_why_no_nccl(platform))
    return "nccl" if can_nccl else "gloo"


def _why_no_nccl(platform: str) -> str:
    if platform == "win32":
        return f"NCCL library not available: there is none for Windows. {CPU_HINT}"
    return f"NCCL library not available: no NVIDIA GPU was found on this host (see nvidia-smi). {CPU_HINT}"


def advice(backend: str, platform: str, world_size: int, local_world_size: int) -> str | None:
    """One line for a group that runs but gains nothing in parallel; None when there is nothing to say."""
    if platform == "darwin" and backend == "gloo" and local_world_size > 1:
        return (
            f"{local_world_size} processes share one Mac: no parallel benefit, they compete for its "
            "cores. HINT: run `python train.py` in one process."
        )
    if backend == "gloo" and local_world_size == world_size > (os.cpu_count() or 1):
        return (
            f"{world_size} CPU processes share {os.cpu_count()} cores: no parallel benefit. "
            "HINT: start at most one process per core."
        )
    return None


def visible_gpus(env: Mapping[str, str], device_folder: str = "/dev") -> list[str]:
    """The GPUs this process may use, as CUDA names them (indices or UUIDs), found without loading CUDA."""
    limit = env.get("CUDA_VISIBLE_DEVICES")
    present = _gpu_nodes(device_folder)
    if limit is None:
        return present
    named = [part.strip() for part in limit.split(",") if part.strip()]
    usable = named[: named.index("-1")] if "-1" in named else named
    return usable if present else []


def local_devices(gpus: list[str], local_rank: int, local_world_size: int) -> list[int] | None:
    """Positions in `gpus` that belong to `local_rank`; None for all of them.

    A process that sees one GPU uses it whatever its LOCAL_RANK: its engine already chose. Several GPUs
    are shared out in equal runs, so one process per host keeps them all; where the number of processes
    is unknown (0) each takes one, as under torch.
    Raises: ConfigError when there are more processes than GPUs.
    """
    if len(gpus) <= 1 or local_world_size == 1:
        return None
    share = len(gpus) // local_world_size if local_world_size else 1
    if share < 1 or (local_rank + 1) * share > len(gpus):
        raise ConfigError(
            f"LOCAL_RANK={local_rank} of {local_world_size or 'some'} processes on this host, which shows "
            f"{len(gpus)} GPUs ({', '.join(gpus)}). HINT: start at most {len(gpus)} processes per host, "
            "or set DISTRIBUTED_BACKEND=cpu."
        )
    return list(range(local_rank * share, (local_rank + 1) * share))


def _gpu_nodes(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted((m[1] for m in map(re.compile(r"nvidia(\d+)$").match, names) if m), key=int)
