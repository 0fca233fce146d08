"""MPICH and Intel MPI: PMI_RANK and PMI_SIZE, as written by the hydra process manager."""

from collections.abc import Mapping
from typing import Any

from cyxjax.errors import ConfigError
from cyxjax.launch.topology import Topology, common_fields, job_port, read_int, refuse_half_set

SOURCE = "PMI (MPICH, Intel MPI)"
NAMES = ("PMI_RANK", "PMI_SIZE")


def detect(env: Mapping[str, str]) -> Topology | None:
    """The place mpiexec gave this process; None without PMI_RANK and PMI_SIZE."""
    if not any(name in env for name in NAMES):
        return None
    refuse_half_set(env, NAMES, SOURCE)
    rank, world_size = read_int(env, NAMES[0]), read_int(env, NAMES[1])
    here = read_int(env, "MPI_LOCALNRANKS", world_size)
    derived: dict[str, Any] = {"master_addr": env.get("MASTER_ADDR") or _master(env, here >= world_size)}
    if "PMI_PORT" in env and "MASTER_PORT" not in env:  # unique to the job, unlike our default port
        derived["master_port"] = job_port(env["PMI_PORT"])
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_int(env, "MPI_LOCALRANKID", rank if here >= world_size else 0),
        local_world_size=here,
        source=SOURCE,
        names=NAMES,
        **(common_fields(env) | derived),
    )


def _master(env: Mapping[str, str], everyone_here: bool) -> str:
    if everyone_here:
        return "127.0.0.1"
    host = env.get("PMI_PORT", "").rpartition(":")[0]  # HOST:PORT of mpiexec itself
    if host:
        return host
    raise ConfigError(
        f"{env['PMI_SIZE']} ranks on several hosts (from {SOURCE}), and rank 0's host is not in the "
        "environment. HINT: add `-genv MASTER_ADDR <rank 0's host>` to mpiexec."
    )
