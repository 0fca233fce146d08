"""Open MPI 4 and 5: `mpirun -np N python train.py` (jax itself knows only version 4)."""

import re
from collections.abc import Mapping

from cyxjax.errors import ConfigError
from cyxjax.launch.topology import Topology, common_fields, job_port, read_int

SOURCE = "Open MPI"
NAMES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def detect(env: Mapping[str, str]) -> Topology | None:
    """The place mpirun gave this process; None outside mpirun. MASTER_ADDR and MASTER_PORT win."""
    if NAMES[0] not in env:
        return None
    world_size = read_int(env, NAMES[1])
    here = read_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    job = job_name(env)
    derived = {
        "master_addr": env.get("MASTER_ADDR") or _master(env, everyone_here=here >= world_size),
        "master_port": read_int(env, "MASTER_PORT", job_port(job)),
        "run_id": env.get("CYXJAX_RUN_ID", job),
    }
    return Topology(
        rank=read_int(env, NAMES[0]),
        world_size=world_size,
        local_rank=read_int(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_world_size=here,
        source=SOURCE,
        names=NAMES,
        **(common_fields(env) | derived),
    )


def job_name(env: Mapping[str, str]) -> str:
    """A name all ranks of one mpirun share, and no other mpirun on the host does."""
    said = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_orte_hnp_uri")
    return f"mpirun-{said or 'job'}"


def _master(env: Mapping[str, str], *, everyone_here: bool) -> str:
    """The host that runs mpirun, which holds rank 0 unless the host file says otherwise."""
    if everyone_here:
        return "127.0.0.1"
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")  # version 4: "id;tcp://10.0.0.1,10.1.0.1:34911"
    if found := re.search(r"tcp://\[?([^,:\]]+)", uri):
        return found[1]
    namespace = env.get("PMIX_NAMESPACE", "")  # version 5: "prterun-HOST-PID@1"
    if found := re.match(r"prte(?:run)?-(.+)-\d+@\d+$", namespace):
        return found[1]
    raise ConfigError(
        f"{env[NAMES[1]]} ranks on several hosts (from Open MPI), and rank 0's host is not in the "
        "environment. HINT: add `-x MASTER_ADDR=<rank 0's host>` to mpirun."
    )
