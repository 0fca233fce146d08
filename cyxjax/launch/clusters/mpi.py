"""Open MPI 4 and 5 (jax itself knows only version 4), MPICH and Intel MPI: `mpirun -n N python train.py`."""

import re
from collections.abc import Mapping

from cyxjax.errors import ConfigError
from cyxjax.launch.topology import Topology, common_fields, job_port, read_int, refuse_half_set

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
PMI = ("PMI_RANK", "PMI_SIZE")  # as written by the hydra process manager


def detect(env: Mapping[str, str]) -> Topology | None:
    """The place mpirun or mpiexec gave this process; None outside both. The user's MASTER_* win."""
    if OPEN_MPI[0] in env:
        here = read_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
        local_rank = read_int(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
        job, host = _open_mpi_job(env), _open_mpi_host(env)
        return _place(env, "Open MPI", OPEN_MPI, here, local_rank, job, host, run_id=job)
    if not any(name in env for name in PMI):
        return None
    source, mpiexec = "PMI (MPICH, Intel MPI)", env.get("PMI_PORT", "")  # HOST:PORT of mpiexec itself
    refuse_half_set(env, PMI, source)
    rank, world_size = (read_int(env, name) for name in PMI)
    here = read_int(env, "MPI_LOCALNRANKS", world_size)
    local_rank = read_int(env, "MPI_LOCALRANKID", rank if here >= world_size else 0)
    return _place(env, source, PMI, here, local_rank, mpiexec or "mpiexec", mpiexec.rpartition(":")[0])


def _place(
    env: Mapping[str, str],
    source: str,
    names: tuple[str, str],
    here: int,
    local_rank: int,
    job: str,
    host: str,
    run_id: str = "",
) -> Topology:
    """here: ranks on this host. job: a name its ranks share, and no other job on the host. host: rank 0's.

    run_id: a name that all ranks share, also on other hosts, where there is one.
    """
    world_size = read_int(env, names[1])
    fields = common_fields(
        env,
        master_addr="127.0.0.1" if here >= world_size else host,
        master_port=job_port(job),
        run_id=run_id,
    )
    if not fields["master_addr"]:
        raise ConfigError(
            f"{names[1]}={world_size} on several hosts (from {source}), but rank 0's host is not in the "
            "environment. HINT: add `-x MASTER_ADDR=HOST` to mpirun, `-genv MASTER_ADDR HOST` to mpiexec."
        )
    rank = read_int(env, names[0])
    return Topology(rank, world_size, local_rank, here, source=source, names=names, **fields)


def _open_mpi_job(env: Mapping[str, str]) -> str:
    job_id = (
        env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_orte_hnp_uri")
    )
    return f"mpirun-{job_id or 'job'}"


def _open_mpi_host(env: Mapping[str, str]) -> str:
    """The host that runs mpirun, which holds rank 0 unless the host file says otherwise."""
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")  # version 4: "id;tcp://10.0.0.1,10.1.0.1:34911"
    namespace = env.get("PMIX_NAMESPACE", "")  # version 5: "prterun-HOST-PID@1"
    found = re.search(r"tcp://\[?([^,:\]]+)", uri) or re.match(r"prte(?:run)?-(.+)-\d+@\d+$", namespace)
    return found[1] if found else ""
