"""Which ranks this host runs, and where the group meets: from flags, the environment, or the engine."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import jax_env, kubernetes, mpi, slurm
from cyxjax.launch.group import protocol
from cyxjax.launch.topology import (
    DEFAULT_ADDR,
    DEFAULT_PORT,
    MAX_WORLD_SIZE,
    Topology,
    common_fields,
    read_int,
    whole,
)

_ENGINES = (jax_env.detect, slurm.detect, mpi.detect, kubernetes.detect)


@dataclass(frozen=True)
class LocalRanks:
    """Ranks base_rank ... base_rank + nproc - 1 of world_size run here. master_port 0: any free port."""

    nproc: int
    base_rank: int
    world_size: int
    master_addr: str
    master_port: int
    run_id: str
    timeout_ms: int = 30_000
    token: str = field(default="", repr=False)

    @property
    def is_first(self) -> bool:
        """True on the host of rank 0, whose launcher holds the group's server."""
        return self.base_rank == 0

    @property
    def is_alone(self) -> bool:
        """True when all ranks are on this host."""
        return self.nproc == self.world_size

    def variables(self, local_rank: int, *, is_hosted: bool = True) -> dict[str, str]:
        """torchrun's variables for one rank here. is_hosted: its parent holds the group's server."""
        hosted = {"CYXJAX_HOSTED": "1", "CYXJAX_TOKEN": self.token} if is_hosted else {}
        return hosted | {
            "RANK": str(self.base_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def place_to_spawn(nprocs: int, env: Mapping[str, str] = os.environ) -> LocalRanks:
    """`nprocs` ranks of this host: all of a group, or where RANK and WORLD_SIZE say among other hosts'.

    Raises: ConfigError when there are more than WORLD_SIZE.
    """
    first, world_size = 0, nprocs
    if "RANK" in env and "WORLD_SIZE" in env:
        first, world_size = read_int(env, "RANK"), read_int(env, "WORLD_SIZE")
    if first + nprocs > world_size:
        raise ConfigError(
            f"nprocs={nprocs} from RANK={first} on exceeds WORLD_SIZE={world_size}. "
            "HINT: WORLD_SIZE counts the processes of all hosts, RANK is this host's first."
        )
    if world_size == nprocs:
        return LocalRanks(nprocs, 0, nprocs, DEFAULT_ADDR, 0, "", token=protocol.new_token())
    address, port = env.get("MASTER_ADDR", DEFAULT_ADDR), read_int(env, "MASTER_PORT", DEFAULT_PORT)
    return LocalRanks(nprocs, first, world_size, address, port, "")


def find_place(given: argparse.Namespace, nproc: int, env: Mapping[str, str]) -> LocalRanks:
    """This host's share of the group. Raises: ConfigError when flags and environment do not fit together."""
    common = common_fields(env)
    hosts = elastic_hosts(given.nnodes)
    if hosts is not None:  # each start has its own ranks; here the most there may be
        (base, engine), world = _seat(given, nproc, env), hosts[1] * nproc
    elif given.standalone:
        base, world, engine = 0, nproc, None
    else:
        base, world, engine = _share(given, nproc, env)
    alone = world == nproc
    addr, port = _address(given, env, engine, alone)
    Topology(
        base, world, master_addr=addr, master_port=port or 1, source="the launcher's flags"
    )  # its checks
    if base + nproc > world:
        raise ConfigError(
            f"ranks {base} to {base + nproc - 1} would run here, but there are only {world} in all. "
            "HINT: RANK is the first rank of this host; WORLD_SIZE counts all hosts' processes."
        )
    run_id = given.rdzv_id or common["run_id"] or (engine.run_id if engine else "")
    return LocalRanks(
        nproc=nproc,
        base_rank=base,
        world_size=world,
        master_addr=addr,
        master_port=port,
        run_id=run_id or (f"job-{os.urandom(4).hex()}" if alone else "job"),
        timeout_ms=common["timeout_ms"],
        token=common["token"] or (protocol.new_token() if alone else ""),
    )


def _share(given: argparse.Namespace, nproc: int, env: Mapping[str, str]) -> tuple[int, int, Topology | None]:
    """(first rank here, world size, the engine that placed this launcher)."""
    if given.node_rank is None and given.nnodes is None and "RANK" in env and "WORLD_SIZE" in env:
        return read_int(env, "RANK"), read_int(env, "WORLD_SIZE"), None
    if given.node_rank is None and given.nnodes in (None, "1"):
        engine = next((found for detect in _ENGINES if (found := detect(env)) and found.world_size > 1), None)
        if engine is not None:
            return engine.rank * nproc, engine.world_size * nproc, engine
    nnodes = _hosts(given.nnodes)
    if nnodes > 1 and given.node_rank is None:
        raise ConfigError(
            f"--nnodes={nnodes} without --node-rank: which of the hosts is this? "
            "HINT: add --node-rank 0 on the host that --master-addr names, 1, 2, ... on the others."
        )
    node_rank = whole("--node-rank", given.node_rank or "0", 0, nnodes - 1)
    return node_rank * nproc, nnodes * nproc, None


def elastic_hosts(text: str | None) -> tuple[int, int] | None:
    """(MIN, MAX) of --nnodes MIN:MAX; None for one number, also where both are equal. Raises: ConfigError."""
    low_text, colon, high_text = (text or "1").partition(":")
    low = whole("--nnodes", low_text, 1, MAX_WORLD_SIZE)
    high = whole("--nnodes", high_text, 1, MAX_WORLD_SIZE) if colon else low
    if high < low:
        raise ConfigError(f"--nnodes={text}: the most is below the fewest. HINT: write MIN:MAX, as in 1:4.")
    return None if low == high else (low, high)


def _hosts(text: str | None) -> int:
    """The number of hosts of a job of fixed size."""
    return int((text or "1").partition(":")[0])


def _seat(given: argparse.Namespace, nproc: int, env: Mapping[str, str]) -> tuple[int, Topology | None]:
    """(0 on the first host and nproc on the others, the engine that says so) for a job of changing size."""
    if given.node_rank is not None:
        return min(whole("--node-rank", given.node_rank, 0, MAX_WORLD_SIZE), 1) * nproc, None
    engine = next((found for detect in _ENGINES if (found := detect(env)) and found.world_size > 1), None)
    return (nproc if engine is None else min(engine.rank, 1) * nproc), engine


def _address(
    given: argparse.Namespace, env: Mapping[str, str], engine: Topology | None, alone: bool
) -> tuple[str, int]:
    """Flags before the environment before the engine. On one host: loopback and a free port."""
    host, _, port = (given.rdzv_endpoint or "").rpartition(":")
    if given.rdzv_endpoint and not (host and port.isdigit()):
        raise ConfigError(
            f"--rdzv-endpoint={given.rdzv_endpoint!r} is not HOST:PORT. HINT: write 10.0.0.1:29500."
        )
    addr = given.master_addr or host or env.get("MASTER_ADDR") or (engine.master_addr if engine else "")
    chosen = given.master_port or port or (None if given.standalone else env.get("MASTER_PORT"))
    if not alone and not addr:
        raise ConfigError(
            "several hosts, and no address to meet at. HINT: add --master-addr with an address of host 0."
        )
    default = 0 if alone else engine.master_port if engine else DEFAULT_PORT
    return addr or DEFAULT_ADDR, whole("MASTER_PORT", chosen, 0, 65_535) if chosen else default
