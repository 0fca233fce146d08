"""The group this process belongs to: cyxjax's only global, created by `init` and removed by `finalize`.

Two spellings of the same calls: `init`/`finalize`, and torch's `init_process_group`/`destroy_process_group`.
"""

import atexit
import sys
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from cyxjax.errors import ConfigError, GroupError, translated
from cyxjax.launch import environment as backends
from cyxjax.launch.backend import pages, programs
from cyxjax.launch.clusters import discover, torchrun
from cyxjax.launch.connect import connect, disconnect
from cyxjax.launch.environment import here, prepare
from cyxjax.launch.program import code_facts
from cyxjax.launch.topology import (
    DEFAULT_ADDR,
    DEFAULT_PORT,
    DEFAULT_TIMEOUT_MS,
    Topology,
    common_fields,
    processes_here,
    split_address,
)


class BackendType(StrEnum):
    """The transport of the collectives. `CPU` and gloo are the same; `AUTO` is nccl where there is a GPU."""

    AUTO = "auto"
    CPU = "gloo"
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(slots=True)
class DistributedConfig:
    """This process's place in the group, for `init(config)`, instead of the environment's."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    """Index of this process on its host; None: the same as rank."""
    master_addr: str = DEFAULT_ADDR
    master_port: int = DEFAULT_PORT
    backend: str = BackendType.AUTO
    timeout_ms: int = DEFAULT_TIMEOUT_MS

    @classmethod
    def from_environment(cls) -> "DistributedConfig":
        """The place that the environment names (torchrun, Slurm, MPI, ...); otherwise a group of one."""
        place = discover(here())
        return cls(**{f.name: getattr(place, f.name) for f in fields(cls)})

    def to_topology(self) -> Topology:
        """The checked, frozen form, in the launcher's job. Raises: ConfigError naming the field."""
        job, given = common_fields(here()), {f.name: getattr(self, f.name) for f in fields(self)}
        given["local_rank"] = self.rank if self.local_rank is None else self.local_rank
        count = processes_here(here(), self.world_size, self.master_addr)
        return Topology(**(job | given), local_world_size=count, source="DistributedConfig")


@dataclass(frozen=True)
class ProcessGroup:
    """An initialized group: this process's place in it, the transport of collectives, and all devices."""

    topology: Topology
    backend: str
    mesh: Any  # jax.sharding.Mesh over axis "data"
    threads: int = 0  # of this process's CPU pool; 0: not known


_current: ProcessGroup | None = None


def init(
    config: DistributedConfig | None = None, *, cpu_devices: int | None = None, threads: int | None = None
) -> ProcessGroup:
    """Joins the group that `config`, or else the environment, describes; a group of one if neither does.

    cpu_devices: virtual devices on a CPU machine, divided among the processes (at least one each).
    threads: CPU threads of each process, for `reproducibility: exact` (its number of virtual replicas).
    Raises: ConfigError for an invalid place; GroupError if the group does not form within timeout_ms.
    """
    return _join(config.to_topology() if config is not None else discover(here()), cpu_devices, threads)


def _join(topology: Topology, cpu_devices: int | None = None, threads: int | None = None) -> ProcessGroup:
    global _current
    if _current is not None:
        raise GroupError(
            f"the process group is already initialized (rank {get_rank()} of {get_world_size()}). "
            "HINT: call destroy_process_group() first, or use the existing group."
        )
    chosen = backends.settle(topology)
    share = None if cpu_devices is None else max(1, cpu_devices // topology.world_size)
    prepare(topology, share, threads=threads)
    connect(replace(topology, backend=chosen), code_facts() if topology.world_size > 1 else None)
    programs.keep(tell=topology.is_master)
    if chosen == "gloo":
        pages.use(processes_here=topology.local_world_size)

    from cyxjax.core.exact.calls import read_xla_flags
    from cyxjax.core.mesh import build_mesh, local_replicas  # only now may jax start
    from cyxjax.launch.backend.lowerings import use_quick_operations

    use_quick_operations()
    read_xla_flags(here().get("XLA_FLAGS", ""))
    with translated():
        mesh = build_mesh()
    processes = len({device.process_index for device in mesh.devices.flat})
    backend = backends.check_started(topology, chosen, mesh.devices.flat[0].platform, processes)
    _current = ProcessGroup(topology, backend, mesh, backends.pool_threads(len(local_replicas(mesh))))
    atexit.register(finalize)
    for line in backends.advice(backend, topology) if topology.is_master else []:
        print(f"cyxjax: {line}", file=sys.stderr)
    return _current


def narrow(count: int) -> ProcessGroup:
    """Narrows a group of one process to its first `count` devices. Raises: GroupError if it has fewer."""
    global _current
    group = current()
    from cyxjax.core.mesh import build_mesh

    found = list(group.mesh.devices.flat)
    if group.topology.world_size > 1 or len(found) < count:
        raise GroupError(
            f"{count} devices were asked for; this group has {len(found)} in {group.topology.world_size} "
            "processes. HINT: ask before the first jax array is made: jax keeps its first number of devices."
        )
    _current = replace(group, mesh=build_mesh(found[:count]))
    return _current


def finalize() -> None:
    """Leaves the group; afterwards `init` may be called again in a group of one. Calling it twice is fine."""
    global _current
    if _current is None:
        return
    group, _current = _current, None
    atexit.unregister(finalize)
    if group.topology.world_size > 1:
        disconnect()


def init_process_group(
    backend: str = "auto",
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    timeout: Any = None,
) -> None:
    """torch's spelling of `init`. Arguments take the place of the variables of the environment.

    init_method: `env://`, or `tcp://HOST:PORT` of rank 0 (MASTER_ADDR, MASTER_PORT). timeout: seconds or a
    timedelta that ranks wait for each other to join (DISTRIBUTED_TIMEOUT_MS).
    """
    given: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "DISTRIBUTED_TIMEOUT_MS": None if timeout is None else round(seconds(timeout) * 1000),
        "DISTRIBUTED_BACKEND": None if backend == "auto" else backend,
    }
    if init_method.startswith("tcp://"):
        address = split_address("init_method", init_method.removeprefix("tcp://"))
        given["MASTER_ADDR"], given["MASTER_PORT"] = address
    elif init_method != "env://":
        raise ConfigError(
            f"init_method={init_method!r} is not known; expected 'env://' or 'tcp://HOST:PORT'. "
            "HINT: leave it out and set MASTER_ADDR and MASTER_PORT."
        )
    env = {**here(), **{name: str(value) for name, value in given.items() if value is not None}}
    by_hand = torchrun.detect(env) if rank is not None or world_size is not None else None
    _join(by_hand or discover(env))


def seconds(timeout: Any) -> float:
    """A number of seconds or a timedelta, in seconds."""
    return timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)


def setup_distributed() -> tuple[int, int, int]:
    """Joins the environment's group, if any; returns (rank, local_rank, world_size), else (0, 0, 1)."""
    group = ensure()
    return group.topology.rank, group.topology.local_rank, group.topology.world_size


destroy_process_group = finalize
cleanup = finalize


def is_initialized() -> bool:
    return _current is not None


def current() -> ProcessGroup:
    """The group. Raises: GroupError before `init`, naming the missing call."""
    if _current is None:
        raise GroupError(
            "the distributed process group is not initialized. HINT: call "
            "cx.distributed.init_process_group() (or cx.distributed.init()) first."
        )
    return _current


def ensure() -> ProcessGroup:
    """The group, initialized from the environment if there is none yet."""
    return current() if is_initialized() else init()


def get_rank() -> int:
    """This process's number in [0, world_size)."""
    return current().topology.rank


def get_world_size() -> int:
    """The number of processes."""
    return current().topology.world_size


def get_local_rank() -> int:
    """This process's number on its host."""
    return current().topology.local_rank


def get_num_replicas() -> int:
    """The number of devices of all processes: `world_size` when each owns one."""
    return current().mesh.size


def is_master() -> bool:
    """True on rank 0, and where there is no group: the process that prints and writes."""
    return _current is None or _current.topology.is_master


is_main_process = is_master
