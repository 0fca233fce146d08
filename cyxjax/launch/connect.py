"""Connects this process to its group: starts and ends `jax.distributed`. Imports jax late."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cyxjax.launch import heartbeat, output, save_request
from cyxjax.launch.backend import jax_private
from cyxjax.launch.environment import local_devices, visible_gpus
from cyxjax.launch.failure import hooks as exits
from cyxjax.launch.group import client
from cyxjax.launch.group.client import GroupConnection
from cyxjax.launch.topology import TPU_SLICE, Topology, is_loopback

if TYPE_CHECKING:
    from cyxjax.launch.group.coordinator import Coordinator

LEAVE_S = 300.0  # how long a finished rank waits for the others (a last save, a last evaluation)


@dataclass
class Connection:
    """What exists while this process is in the group; `coordinator` only where rank 0 holds the server."""

    group: GroupConnection
    exits: exits.Exits
    coordinator: "Coordinator | None" = None


_connection: Connection | None = None


def connect(
    topology: Topology, facts: Mapping[str, str] | None = None, env: Mapping[str, str] = os.environ
) -> None:
    """Joins the group: meets the other ranks, then starts jax.distributed. A group of one needs neither.

    On a slice of TPU hosts jax itself forms the group, and nothing is compared.
    facts: what must be equal on all ranks besides the versions, e.g. {"config": sha256 of it}.
    Raises: GroupError when a peer is missing or differs, or jax has started its devices already.
    """
    save_request.listen()
    heartbeat.start(env)
    if topology.world_size > 1:
        jax_private.refuse_started_backend("a group of several processes")
        hooks = exits.install(topology.rank, topology.restart_count, env)
        if topology.source == TPU_SLICE:
            jax_private.start_detected()
        else:
            _meet(topology, facts, hooks, env)
    elif topology.hosted:  # no peers, but its errors are recorded and its stacks can be dumped
        exits.install(topology.rank, topology.restart_count, env)
    heartbeat.report_progress(-1, "idle")


def _meet(
    topology: Topology, facts: Mapping[str, str] | None, hooks: exits.Exits, env: Mapping[str, str]
) -> None:
    """Joins the group of our own server and starts jax in it."""
    global _connection
    coordinator = None if topology.hosted or not topology.is_master else _coordinate(topology)
    try:
        group = client.join(topology, facts)
    except BaseException:
        if coordinator is not None:  # sends the reason to the others; this process may have heard it first
            coordinator.end()
        raise
    hooks.report = group.fail if coordinator is None else partial(_fail_and_wait, group, coordinator)
    _connection = Connection(group, hooks, coordinator)
    group.watch(hooks.lose)
    _start_jax(topology, group, env)


def disconnect() -> None:
    """Leaves the group once all ranks have called this, so that no rank's last collective is cut off."""
    global _connection
    connection, _connection = _connection, None
    if connection is None or connection.exits.in_child():  # a forked child's end is not the rank's
        return
    exits.end_if_failed(connection.exits)
    heartbeat.report_progress(heartbeat.progress().step, "done")
    if not connection.group.wait_until_all_are_done(LEAVE_S):
        output.log(f"left the group although not all ranks reached the end within {LEAVE_S:g} s")
    jax_private.shut_down_client()
    connection.group.leave()
    if connection.coordinator is not None:
        connection.coordinator.wait_until_ranks_left(timeout_s=10)
        import jax

        jax.distributed.shutdown()  # ends the service that this process may host, which aborts clients left
        connection.coordinator.end()


def _fail_and_wait(group: GroupConnection, coordinator: "Coordinator", summary: str) -> None:
    """For the rank that holds the server and jax's service: the others get the reason, and end before it.

    Native code aborts a rank that outlives jax's service.
    """
    group.fail(summary)
    group.leave()
    coordinator.wait_until_ranks_left(timeout_s=2)


def _coordinate(topology: Topology) -> "Coordinator":
    """Opens the group's server in this process: there is no launcher, so rank 0 does it."""
    from cyxjax.launch.group.coordinator import Coordinator, warn_without_token
    from cyxjax.launch.local_ranks import LocalRanks

    place = LocalRanks(
        max(1, topology.local_world_size),
        0,
        topology.world_size,
        topology.master_addr,
        topology.master_port,
        topology.run_id,
        topology.timeout_ms,
        topology.token,
    )
    if not is_loopback(place.master_addr):  # started by hand: not all ranks may be on this host
        warn_without_token(place, output.log)
    coordinator = Coordinator(place, output.log, serves=False)
    coordinator.open(topology.restart_count)
    return coordinator


def _start_jax(topology: Topology, group: GroupConnection, env: Mapping[str, str]) -> None:
    _choose_devices(topology, env)
    jax_private.use_gloo_address(group.own_address, env.get("GLOO_SOCKET_IFNAME"))
    address, served = str(group.coordinator["address"]), bool(group.coordinator["served"])
    jax_private.start_distributed(address, topology.rank, topology.world_size, served=served)


def _choose_devices(topology: Topology, env: Mapping[str, str]) -> None:
    if topology.backend == "gloo":
        return
    place, limited = (topology.local_rank, topology.local_world_size), "CUDA_VISIBLE_DEVICES" in env
    chosen = local_devices(visible_gpus(env), *place, limited)
    if chosen is not None:
        import jax

        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, chosen)))
