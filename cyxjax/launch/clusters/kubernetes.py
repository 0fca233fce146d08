"""A Kubernetes indexed Job: the pod's index is the rank, the manifest gives WORLD_SIZE and MASTER_ADDR."""

from collections.abc import Mapping

from cyxjax.launch.clusters import tpu
from cyxjax.launch.topology import Topology, common_fields, read_int, refuse_half_set

SOURCE = "Kubernetes indexed Job"
INDEX = "JOB_COMPLETION_INDEX"


def detect(env: Mapping[str, str]) -> Topology | None:
    """The pod's place in its Job; None outside an indexed Job, and where TPU hosts have numbers of their own.

    Raises: ConfigError when WORLD_SIZE or MASTER_ADDR is missing: a pod alone cannot know how many there
        are, and N pods that each train alone would look like success.
    """
    if INDEX not in env or (tpu.ID in env and "WORLD_SIZE" not in env):
        return None
    refuse_half_set(env, (INDEX, "WORLD_SIZE"), SOURCE)
    world_size = read_int(env, "WORLD_SIZE")
    if world_size > 1:
        refuse_half_set(env, (INDEX, "MASTER_ADDR"), SOURCE)
    return Topology(
        rank=read_int(env, INDEX) if world_size > 1 else 0,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        source=SOURCE,
        names=(INDEX, "WORLD_SIZE"),
        **common_fields(env),
    )
