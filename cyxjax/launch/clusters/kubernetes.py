"""A Kubernetes indexed Job: the pod's index is the rank, the manifest gives WORLD_SIZE and MASTER_ADDR."""

from collections.abc import Mapping

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import tpu
from cyxjax.launch.topology import Topology, common_fields, read_int

SOURCE = "Kubernetes indexed Job"
INDEX = "JOB_COMPLETION_INDEX"


def detect(env: Mapping[str, str]) -> Topology | None:
    """The pod's place in its Job; None outside an indexed Job, and where TPU hosts have numbers of their own.

    Raises: ConfigError when WORLD_SIZE or MASTER_ADDR is missing: a pod alone cannot know how many there
        are, and N pods that each train alone would look like success.
    """
    if INDEX not in env or (tpu.ID in env and "WORLD_SIZE" not in env):
        return None
    _require(env, "WORLD_SIZE", "the Job's `completions`")
    world_size = read_int(env, "WORLD_SIZE")
    if world_size > 1:
        _require(env, "MASTER_ADDR", "pod 0's name, JOB-0.SERVICE")
    return Topology(
        rank=read_int(env, INDEX) if world_size > 1 else 0,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        source=SOURCE,
        names=(INDEX, "WORLD_SIZE"),
        **common_fields(env),
    )


def _require(env: Mapping[str, str], name: str, meaning: str) -> None:
    if name not in env:
        raise ConfigError(
            f"{INDEX}={env[INDEX]} says this is a pod of an indexed Job, but {name} ({meaning}) is missing. "
            "HINT: write the manifest with `cyxjax manifest k8s`, or set WORLD_SIZE=1 to train "
            "alone in each pod."
        )
