"""Slurm: `srun python train.py` starts every rank. The script of an sbatch job itself is not a rank."""

import re
from collections.abc import Mapping

from cyxjax.launch.topology import Topology, common_fields, job_port, read_int

SOURCE = "Slurm"


def detect(env: Mapping[str, str]) -> Topology | None:
    """The task's place in its step; None outside a step started by srun.

    Rank 0's host is the step's first node, the port follows from job and step; MASTER_ADDR and
    MASTER_PORT take precedence over both.
    """
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    job = f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return Topology(
        rank=read_int(env, "SLURM_PROCID"),
        world_size=read_int(env, world_name),
        local_rank=read_int(env, "SLURM_LOCALID", 0),
        local_world_size=_tasks_here(env),
        source=SOURCE,
        names=("SLURM_PROCID", world_name),
        **common_fields(env, master_addr=_first_node(env), master_port=job_port(job), run_id=f"slurm-{job}"),
    )


def _first_node(env: Mapping[str, str]) -> str:
    """The first host of a node list such as "gpu[01-02,7],x"; loopback where there is no other."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    several = re.search(r",|\[[^]]*-", nodes)
    first = re.split(r",(?![^[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first) if several else "127.0.0.1"


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks on this node, from SLURM_STEP_TASKS_PER_NODE such as "4(x2),3"."""
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(nodes or 1)
    node = read_int(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 1
