"""A slice of TPU hosts: every host has one process. jax itself reads these variables to form the group."""

from collections.abc import Mapping

from cyxjax.launch.topology import TPU_SLICE, Topology, common_fields, read_int

ID, HOSTS = "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"


def detect(env: Mapping[str, str]) -> Topology | None:
    """The host's place in its slice, or slices; None for one TPU host, and where the CPU was asked for."""
    common = common_fields(env)
    hosts = [host for host in env.get("TPU_PROCESS_ADDRESSES", env.get(HOSTS, "")).split(",") if host]
    num_slices = read_int(env, "MEGASCALE_NUM_SLICES", 1)
    on_cpu = common["backend"] in ("cpu", "gloo") or env.get("JAX_PLATFORMS", "").lower().startswith("cpu")
    if ID not in env or on_cpu or len(hosts) * num_slices < 2:
        return None
    return Topology(
        rank=read_int(env, ID) + read_int(env, "MEGASCALE_SLICE_ID", 0) * len(hosts),
        world_size=len(hosts) * num_slices,
        local_world_size=1,
        source=TPU_SLICE,
        names=(ID, HOSTS),
        **(common | {"master_addr": hosts[0].partition(":")[0]}),
    )
