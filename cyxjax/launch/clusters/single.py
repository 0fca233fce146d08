"""Nothing said otherwise: one process, a group of one."""

from collections.abc import Mapping

from cyxjax.launch.topology import Topology, common_fields

SOURCE = "single process"


def detect(env: Mapping[str, str]) -> Topology:
    """A group of one, which needs no other process and no port."""
    return Topology(local_world_size=1, source=SOURCE, **common_fields(env))
