"""Detects who started this process and which rank it has: one detector per file, in a fixed order."""

from collections.abc import Mapping

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import jax_env, kubernetes, mpi, slurm, torchrun, tpu
from cyxjax.launch.topology import Topology, common_fields

# What a person wrote by hand comes before what an engine implies.
DETECTORS = (
    jax_env.detect,
    torchrun.detect,
    slurm.detect,
    mpi.detect,
    tpu.detect,
    kubernetes.detect,
)
# These start ranks of their own inside an engine's allocation, so the engine's numbers do not count.
_NESTED = ("cyxjax.launch", "torchrun")


def discover(env: Mapping[str, str]) -> Topology:
    """The place of this process, from the first source that names one; a group of one when none does.

    Raises: ConfigError when a source is half set, or two sources disagree on rank or world size.
    """
    return claims(env)[0]


def claims(env: Mapping[str, str]) -> list[Topology]:
    """Every source's answer, the winner first (`cyxjax env` prints them). Raises: as `discover`."""
    written = torchrun.detect(env)
    if written is not None and written.source in _NESTED:
        return [written]
    found = [topology for topology in (detect(env) for detect in DETECTORS) if topology is not None]
    first, *others = found or [Topology(local_world_size=1, source="single process", **common_fields(env))]
    for other in others:
        # An engine's group of one is no claim: it is the shell or batch script we were started from.
        if other.world_size > 1 and (first.rank, first.world_size) != (other.rank, other.world_size):
            raise ConfigError(
                f"Two sources disagree: {_described(first)} but {_described(other)}. HINT: unset "
                f"{first.names[0]} and {first.names[1]} to follow {other.source}, or start this script "
                f"outside {other.source}."
            )
    return [first, *others]


def _described(topology: Topology) -> str:
    rank_name, world_name = topology.names
    return f"{topology.source} says {rank_name}={topology.rank}, {world_name}={topology.world_size}"
