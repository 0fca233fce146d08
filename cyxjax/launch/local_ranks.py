"""Which ranks this host runs, and where the group meets: from flags, the environment, or the engine."""

import argparse
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import DETECTORS, torchrun, tpu
from cyxjax.launch.topology import (
    DEFAULT_ADDR,
    DEFAULT_PORT,
    HOSTED,
    MAX_WORLD_SIZE,
    PORTS,
    Topology,
    common_fields,
    read_int,
    split_address,
)

_ENGINES = tuple(detect for detect in DETECTORS if detect not in (torchrun.detect, tpu.detect))


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

    def __post_init__(self) -> None:
        if not 0 <= self.base_rank < self.base_rank + self.nproc <= self.world_size:
            raise ConfigError(
                f"nprocs={self.nproc} from RANK={self.base_rank} on; expected at least 1, "
                f"within WORLD_SIZE={self.world_size}. "
                "HINT: WORLD_SIZE counts the processes of all hosts, RANK is this host's first; --node-rank "
                "counts hosts, from 0."
            )

    @property
    def is_first(self) -> bool:
        """True on the host of rank 0, whose launcher holds the group's server."""
        return self.base_rank == 0

    @property
    def is_alone(self) -> bool:
        """True when all ranks are on this host."""
        return self.nproc == self.world_size

    def variables(self, local_rank: int, start: int = 0, *, is_hosted: bool = True) -> dict[str, str]:
        """torchrun's variables for one rank here in start number `start`.

        is_hosted: its parent holds the group's server, which compares run and start.
        """
        hosted = {
            HOSTED: f"{self.master_addr}:{self.master_port}",
            "CYXJAX_TOKEN": self.token,
            "CYXJAX_RUN_ID": self.run_id,
            "RESTART_COUNT": str(start),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # inside torchrun: its agent is not at our MASTER_PORT
        }
        return (hosted if is_hosted else {}) | {
            "RANK": str(self.base_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def place_to_spawn(nprocs: int, env: Mapping[str, str] = os.environ) -> LocalRanks:
    """`nprocs` ranks of this host: all of a group, or those from RANK on of WORLD_SIZE ranks."""
    first, world_size = 0, nprocs
    if "RANK" in env and "WORLD_SIZE" in env:
        first, world_size = read_int(env, "RANK"), read_int(env, "WORLD_SIZE")
    if world_size == nprocs:
        return LocalRanks(nprocs, first, nprocs, DEFAULT_ADDR, 0, "", token=secrets.token_hex(32))
    common = common_fields(env)
    return LocalRanks(nprocs, first, world_size, common["master_addr"], common["master_port"], "")


def find_place(given: argparse.Namespace, nproc: int, env: Mapping[str, str]) -> LocalRanks:
    """This host's share of the group. Raises: ConfigError when flags and environment do not fit together.

    Flags take precedence over RANK (this host's first) and WORLD_SIZE, and these over the engine. Of a job
    whose hosts join and leave it is the largest group possible; each start has its own size.
    """
    fewest, most = given.nnodes or (1, 1)
    host, engine = given.node_rank, None
    if given.standalone:
        base, world = 0, nproc
    elif host is None and given.nnodes is None and "RANK" in env and "WORLD_SIZE" in env:
        base, world = read_int(env, "RANK"), read_int(env, "WORLD_SIZE", bounds=(1, MAX_WORLD_SIZE))
    else:
        is_elastic = fewest < most
        if host is None and (is_elastic or most == 1):
            places = (detect(env) for detect in _ENGINES)
            engine = next((place for place in places if place is not None and place.world_size > 1), None)
        if engine is not None:
            host, most = engine.rank, most if is_elastic else engine.world_size
        if host is None:
            if most > 1 and not is_elastic:
                raise ConfigError(
                    f"--nnodes={most} without --node-rank: the number of this host is not known. "
                    "HINT: add --node-rank 0 on the host that --master-addr names, 1, 2, ... on the others."
                )
            host = int(is_elastic)  # one that joins is not the first
        base, world = (min(host, 1) if is_elastic else host) * nproc, most * nproc
    common, alone = common_fields(env), world == nproc
    addr, port = _address(given, env, engine, alone)
    run_id = given.rdzv_id or common["run_id"] or (engine.run_id if engine else "")
    return LocalRanks(
        nproc=nproc,
        base_rank=base,
        world_size=world,
        master_addr=addr,
        master_port=port,
        run_id=run_id or (f"job-{os.urandom(4).hex()}" if alone else "job"),
        timeout_ms=common["timeout_ms"],
        token=common["token"] or (secrets.token_hex(32) if alone else ""),
    )


def _address(
    given: argparse.Namespace, env: Mapping[str, str], engine: Topology | None, alone: bool
) -> tuple[str, int]:
    """Flags before the environment before the engine. On one host: loopback and a free port."""
    host, port = given.master_addr, given.master_port
    if given.rdzv_endpoint:
        host, port = split_address("--rdzv-endpoint", given.rdzv_endpoint)
    addr = host or env.get("MASTER_ADDR") or (engine.master_addr if engine else "")
    if not alone and not addr:
        raise ConfigError(
            "several hosts, but no address of host 0. HINT: add --master-addr with an address of host 0."
        )
    default = 0 if alone else engine.master_port if engine else DEFAULT_PORT
    if port is None:
        port = default if given.standalone else read_int(env, "MASTER_PORT", default, PORTS)
    return addr or DEFAULT_ADDR, port
