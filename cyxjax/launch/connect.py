"""From a place in the group to a running `jax.distributed`, and back. jax is imported here, late."""

import os
from collections.abc import Mapping

from cyxjax.errors import GroupError
from cyxjax.launch import _compat
from cyxjax.launch.backend import local_devices, visible_gpus
from cyxjax.launch.topology import Topology

# Heartbeats are only the last resort for a host that vanished: gloo and the supervisor notice sooner.
HEARTBEAT_S = 10
SHUTDOWN_S = 10


def connect(topology: Topology, env: Mapping[str, str] = os.environ) -> None:
    """Joins the group: meets the other ranks, then starts jax.distributed. A group of one needs neither.

    Raises: GroupError when jax has started its backend already, or came up with another world size.
    """
    if topology.world_size == 1:
        return
    _compat.refuse_started_backend()
    _choose_devices(topology, env)
    _initialize(topology)
    _check_world(topology)


def disconnect() -> None:
    """Leaves the group after all ranks have arrived here, so that nobody's last collective is cut off."""
    _compat.leave(SHUTDOWN_S)


def _initialize(topology: Topology) -> None:
    import jax

    jax.distributed.initialize(
        topology.address,
        topology.world_size,
        topology.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, topology.timeout_ms // 1000),
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )


def _choose_devices(topology: Topology, env: Mapping[str, str]) -> None:
    if topology.backend == "gloo":
        return
    chosen = local_devices(visible_gpus(env), topology.local_rank, topology.local_world_size)
    if chosen is not None:
        import jax

        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, chosen)))


def _check_world(topology: Topology) -> None:
    """A jax that started on its own before us would let every rank train alone, unnoticed."""
    import jax

    if jax.process_count() != topology.world_size:
        raise GroupError(
            f"jax runs {jax.process_count()} process(es), but {topology.names[1]}={topology.world_size} "
            f"(from {topology.source}). HINT: call init() before anything touches a jax device."
        )
