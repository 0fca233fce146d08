"""The place of this process in its group: one frozen, checked value that everything else receives."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from cyxjax.command import number
from cyxjax.errors import ConfigError

DEFAULT_ADDR = "127.0.0.1"
DEFAULT_PORT = 29500
DEFAULT_TIMEOUT_MS = 30_000
HOSTED = "CYXJAX_HOSTED"  # where the supervisor of this process holds the group's server, HOST:PORT
TPU_SLICE = "TPU slice"  # a source whose group jax itself forms
_BACKENDS = {"auto": "auto", "cpu": "gloo", "gloo": "gloo", "nccl": "nccl"}
PORTS = (0, 65535)  # 0: any free one
MAX_WORLD_SIZE = 100_000  # the first host holds a connection to each rank, and a table of them
MAX_TIMEOUT_MS = 30 * 86_400_000
INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Topology:
    """The place of one process among `world_size`; checked when made.

    `master_addr:master_port` is where the ranks meet; `source` names where it is from (for messages);
    `names` are the variables that held rank and world size. `hosted` is true when a supervisor, not
    rank 0, holds the group's server; `local_world_size` counts this host's processes,
    0 when not known. `token` is the job's secret and never printed.

    Raises: ConfigError naming the variable, its value and where it came from.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 0
    master_addr: str = DEFAULT_ADDR
    master_port: int = DEFAULT_PORT
    backend: str = "auto"
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    source: str = "single process"
    run_id: str = ""
    token: str = field(default="", repr=False)
    restart_count: int = 0
    hosted: bool = False
    names: tuple[str, str] = ("RANK", "WORLD_SIZE")

    def __post_init__(self) -> None:
        backend = _BACKENDS.get(self.backend.strip().lower())
        if backend is None:
            raise ConfigError(
                f"DISTRIBUTED_BACKEND={self.backend!r} (from {self.source}) is unknown; expected auto, cpu "
                "(the same as gloo) or nccl. HINT: leave it unset: NVIDIA GPUs get nccl, everything else "
                "gloo."
            )
        object.__setattr__(self, "backend", backend)
        rank_name, world_name = self.names
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"{rank_name}={self.rank} is outside [0, {world_name}={self.world_size}) "
                f"(from {self.source}). Ranks count over all hosts, not per host. HINT: on host k set "
                f"{rank_name} = k * processes per host + LOCAL_RANK, or start with `python -m cyxjax.launch`."
            )

    @property
    def is_master(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def address(self) -> str:
        """The group's server as HOST:PORT, [HOST]:PORT for IPv6."""
        return join_address(self.master_addr, self.master_port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(name: str, text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [IPV6]:PORT, which `name` holds. Raises: ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{name}={text!r} is not HOST:PORT. HINT: write rank 0's, as in 10.0.0.1:29500.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_int(
    env: Mapping[str, str], name: str, default: int | None = None, bounds: tuple[int, int] = INT32
) -> int:
    """The integer in variable `name`; `default` when it is unset and a default is given.

    Raises: ConfigError that names the variable when it is missing, empty, not an integer or out of bounds.
    """
    if name not in env and default is not None:
        return default
    try:
        return int(number(*bounds)(env.get(name, "")))
    except ArgumentTypeError as error:
        raise ConfigError(f"{name}={error} (from the environment). HINT: set {name} to a number.") from None


def refuse_half_set(env: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    """Raises ConfigError that names what is set and what is missing, if only some of `names` are set."""
    absent = [name for name in names if name not in env]
    if absent and len(absent) < len(names):
        present = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        raise ConfigError(
            f"{present} set, but {' and '.join(absent)} missing (from {source}). "
            f"HINT: set {' and '.join(absent)} too, or unset the others to train in one process."
        )


def common_fields(
    env: Mapping[str, str],
    *,
    master_addr: str = DEFAULT_ADDR,
    master_port: int = DEFAULT_PORT,
    run_id: str = "",
) -> dict[str, Any]:
    """The fields every source shares: address, port, backend, timeout, run, token, restarts.

    master_addr, master_port, run_id: of an engine; what the user has set takes precedence. A process whose
    supervisor holds the group's server meets there, whatever a program sets for torch.
    """
    address = env.get("MASTER_ADDR") or master_addr, read_int(env, "MASTER_PORT", master_port, PORTS)
    if HOSTED in env:
        address = split_address(HOSTED, env[HOSTED])
    return {
        "master_addr": address[0],
        "master_port": address[1],
        "backend": env.get("DISTRIBUTED_BACKEND", "auto").lower(),
        "timeout_ms": read_int(env, "DISTRIBUTED_TIMEOUT_MS", DEFAULT_TIMEOUT_MS, (1, MAX_TIMEOUT_MS)),
        "run_id": env.get("CYXJAX_RUN_ID") or run_id,
        "token": env.get("CYXJAX_TOKEN", ""),
        "restart_count": read_int(env, "RESTART_COUNT", 0),
        "hosted": HOSTED in env,
    }


def processes_here(env: Mapping[str, str], world_size: int, master_addr: str) -> int:
    """Processes on this host: LOCAL_WORLD_SIZE, all of them when they meet on loopback, 0 when unknown."""
    everybody = world_size if world_size == 1 or is_loopback(master_addr) else 0
    return read_int(env, "LOCAL_WORLD_SIZE", everybody)


def is_loopback(host: str) -> bool:
    """True for an address that only this host can reach."""
    return host in ("localhost", "::1") or host.startswith("127.")


def job_port(job: str) -> int:
    """A port in 12000-31999, the same for all ranks of `job` (below Linux's ephemeral range)."""
    return 12_000 + crc32(job.encode()) % 20_000
