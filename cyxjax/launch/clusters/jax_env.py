"""JAX's own names: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID (jax reads only the first)."""

from collections.abc import Mapping

from cyxjax.launch.topology import (
    Topology,
    common_fields,
    processes_here,
    read_int,
    refuse_half_set,
    split_address,
)

SOURCE = "JAX_* variables"
NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def detect(env: Mapping[str, str]) -> Topology | None:
    """The place the three JAX_* variables name; None when none is set. Raises ConfigError when half set."""
    if not any(name in env for name in NAMES):
        return None
    refuse_half_set(env, NAMES, SOURCE)
    host, port = split_address(NAMES[0], env[NAMES[0]])
    rank, world_size = read_int(env, "JAX_PROCESS_ID"), read_int(env, "JAX_NUM_PROCESSES")
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_int(env, "LOCAL_RANK", rank),
        local_world_size=processes_here(env, world_size, host),
        source=SOURCE,
        names=("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        **(common_fields(env) | {"master_addr": host, "master_port": port}),
    )
