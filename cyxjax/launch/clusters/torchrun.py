"""torch's names: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Written by our launcher, by
torchrun, or by hand."""

from collections.abc import Mapping

from cyxjax.launch.topology import Topology, common_fields, processes_here, read_int, refuse_half_set

NAMES = ("RANK", "WORLD_SIZE")


def detect(env: Mapping[str, str]) -> Topology | None:
    """The place RANK and WORLD_SIZE name; None when neither is set. Raises ConfigError when half set."""
    source = _source(env)
    # WORLD_SIZE alone, beside a Job's index, is Kubernetes' to read: the manifest cannot write RANK.
    size_is_ours = "WORLD_SIZE" in env and "JOB_COMPLETION_INDEX" not in env
    if not (size_is_ours or "RANK" in env or "LOCAL_RANK" in env):
        return None
    if env.get("WORLD_SIZE") != "1":  # WORLD_SIZE=1 alone is complete: there is only rank 0
        refuse_half_set(env, (*NAMES, "LOCAL_RANK") if "LOCAL_RANK" in env else NAMES, source)
    rank, world_size, common = read_int(env, "RANK", 0), read_int(env, "WORLD_SIZE"), common_fields(env)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent listens on MASTER_PORT itself
        common["master_port"] += 1 if common["master_port"] < 65535 else -1
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_int(env, "LOCAL_RANK", rank),
        local_world_size=processes_here(env, world_size, common["master_addr"]),
        source=source,
        **common,
    )


def _source(env: Mapping[str, str]) -> str:
    if "CYXJAX_RUN_ID" in env:
        return "cyxjax.launch"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "RANK, WORLD_SIZE"
