"""What must be settled before jax starts: the backend, and variables for threads, devices, time limits."""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch.backend import jax_private
from cyxjax.launch.topology import TPU_SLICE, Topology, read_int


def settle(topology: Topology, env: Mapping[str, str] = os.environ, device_folder: str = "/dev") -> str:
    """'nccl' or 'gloo', as `topology` asks. With gloo, jax chooses the platform if none was asked for.

    With `auto` it is 'nccl' where there is an NVIDIA GPU, unless jax is told to use the CPU.
    Raises: GroupError if nccl is asked for where it is not available; ConfigError where JAX_PLATFORMS is
        cuda and there is no GPU.
    """
    platforms, gpus, wish = named_platforms(env), visible_gpus(env, device_folder), topology.backend
    if platforms == ("cuda",) and not gpus:  # jax would fail with a bare assertion
        raise ConfigError(
            "JAX_PLATFORMS=cuda, but no NVIDIA GPU was found on this host. HINT: unset JAX_PLATFORMS."
        )
    if wish == "nccl" and not gpus:
        raise GroupError(
            "NCCL library not available: no NVIDIA GPU was found on this host (see nvidia-smi). HINT: set "
            "DISTRIBUTED_BACKEND=cpu (backend='gloo') to train on the CPU with the same program."
        )
    return "nccl" if wish == "nccl" or (wish == "auto" and gpus and platforms[:1] != ("cpu",)) else "gloo"


def named_platforms(env: Mapping[str, str]) -> tuple[str, ...]:
    """The platforms that JAX_PLATFORMS, or a jax that is loaded already, was set to use; () for any."""
    text = env.get("JAX_PLATFORMS", "") or _chosen_in_jax()
    return tuple(part for part in text.lower().split(",") if part)


def _chosen_in_jax() -> str:
    """`cpu` if a program chose it in jax's configuration; only this: on a TPU host jax itself writes tpu."""
    loaded = sys.modules.get("jax")
    return "cpu" if loaded is not None and loaded.config.jax_platforms == "cpu" else ""


def check_started(topology: Topology, chosen: str, started: str, processes: int) -> str:
    """The backend jax runs on, to show. started, processes: platform and number of owners of its devices.

    Raises: GroupError where a GPU is idle or is used although the CPU was asked for, or where jax runs a
        different number of processes than the group has.
    """
    if chosen == "nccl" and started == "cpu":
        raise GroupError(
            "this host has an NVIDIA GPU, but jax started on the CPU. HINT: pip install 'cyxjax[gpu]', or "
            "set DISTRIBUTED_BACKEND=cpu (backend='gloo') to train on the CPU on purpose."
        )
    if chosen == "gloo" and started != "cpu" and topology.backend != "auto":
        raise GroupError(
            f"jax started on {started}, but this group is to train on the CPU. HINT: call init() before "
            "anything touches a jax device."
        )
    if processes != topology.world_size:
        raise GroupError(
            f"jax runs {processes} process(es), but {topology.names[1]}={topology.world_size} (from "
            f"{topology.source}). HINT: call init() before anything touches a jax device; on one of several "
            "hosts set RANK, WORLD_SIZE and MASTER_ADDR."
        )
    return chosen if chosen == "nccl" or started == "cpu" else started


def advice(backend: str, topology: Topology) -> list[str]:
    """A warning if processes share cores and so gain nothing, or no line."""
    here = topology.local_world_size
    if backend != "gloo" or here <= (os.cpu_count() or 1):
        return []
    return [
        f"{here} CPU processes share {os.cpu_count()} cores: no parallel benefit. "
        "HINT: start at most one process per core."
    ]


def visible_gpus(env: Mapping[str, str], device_folder: str = "/dev") -> list[str]:
    """The GPUs this process may use, as CUDA names them (indices or UUIDs), found without loading CUDA."""
    limit = env.get("CUDA_VISIBLE_DEVICES")
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path(device_folder).glob("nvidia*"))
    present = sorted((node[1] for node in found if node), key=int)
    if limit is None:
        return present
    named = [part.strip() for part in limit.split(",") if part.strip()]
    usable = named[: named.index("-1")] if "-1" in named else named
    return usable if present else []


def local_devices(
    gpus: list[str], local_rank: int, local_world_size: int, limited: bool = True
) -> list[int] | None:
    """Positions in `gpus` that belong to `local_rank`; None for all of them.

    A process that sees one GPU uses it whatever its LOCAL_RANK where its view is `limited`
    (CUDA_VISIBLE_DEVICES): its engine already chose; else it is the host's only one. Several GPUs
    are divided into equal runs, so one process per host keeps them all; where the number of processes
    is unknown (0) each takes one, as in torch.
    Raises: ConfigError when there are more processes than GPUs: NCCL takes one process per GPU.
    """
    if not gpus or local_world_size == 1 or (len(gpus) == 1 and (limited or not local_world_size)):
        return None
    share = len(gpus) // local_world_size if local_world_size else 1
    if share < 1 or (local_rank + 1) * share > len(gpus):
        raise ConfigError(
            f"LOCAL_RANK={local_rank} of {local_world_size or 'some'} processes on this host, which shows "
            f"the GPUs {', '.join(gpus)}. HINT: start at most one process per GPU, or set "
            "DISTRIBUTED_BACKEND=cpu."
        )
    return list(range(local_rank * share, (local_rank + 1) * share))


def enter(variables: Mapping[str, str]) -> None:
    """Sets `variables` in this process's environment; call it before jax starts its devices."""
    os.environ.update(variables)


# Longer than any legitimate wait between ranks (one compiles, one saves), far below gloo's 30 minutes.
DEFAULT_COLLECTIVE_TIMEOUT_S = 600
_CPU_FLAG = "--xla_cpu_collective_timeout_seconds"
_GPU_FLAG = "--xla_gpu_nccl_termination_timeout_seconds"


def here() -> Mapping[str, str]:
    """This process's environment, for packages that may not read it themselves."""
    return os.environ


def prepare(
    topology: Topology,
    cpu_devices: int | None = None,
    env: MutableMapping[str, str] = os.environ,
    threads: int | None = None,
) -> None:
    """Writes into `env` what jax reads when it starts; keeps whatever the user has set.

    topology: its backend is what was asked for; where the CPU was not asked for, jax chooses the platform.
    cpu_devices: virtual CPU devices that this process is to own (None: as the environment says, else one).
    threads: of XLA's CPU pool (None: this process's share of the cores).
    Raises: GroupError when devices or threads are asked for after jax has started its backend; ConfigError
        when the user's NPROC is not `threads`.
    """
    if cpu_devices is not None:
        env["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
        _configure_loaded_jax(cpu_devices)
    if topology.backend == "gloo":
        env.setdefault("JAX_PLATFORMS", "cpu")  # or a GPU host would train on its GPUs
        loaded = sys.modules.get("jax")  # `check_started` reports a backend that runs already
        if loaded is not None and not loaded.config.jax_platforms:
            loaded.config.update("jax_platforms", env["JAX_PLATFORMS"])
    set_threads(env, topology.local_world_size, threads)
    if topology.world_size > 1 and topology.source != TPU_SLICE:
        _keep_off_proxies(env, topology.master_addr)
        env.setdefault("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo")
        timeout_s = collective_timeout_s(env, topology.timeout_ms)
        env["XLA_FLAGS"] = add_flags(env.get("XLA_FLAGS", ""), {_CPU_FLAG: timeout_s, _GPU_FLAG: timeout_s})


def thread_share(processes_here: int) -> int:
    """CPU threads for one of `processes_here`, so that together they fill the host's cores once."""
    # A pinned process sees fewer cores than the host has.
    return max(1, len(os.sched_getaffinity(0)) // max(1, processes_here))


def collective_timeout_s(env: Mapping[str, str], timeout_ms: int = 0) -> int:
    """Seconds a collective may wait: NCCL_TIMEOUT if set, else 600 or the group's own timeout if longer."""
    default = max(DEFAULT_COLLECTIVE_TIMEOUT_S, timeout_ms // 1000)
    return max(1, read_int(env, "NCCL_TIMEOUT", default))


def add_flags(flags: str, wanted: Mapping[str, object]) -> str:
    """`flags` (XLA_FLAGS) with those of `wanted` appended whose name it does not mention."""
    present = {flag.partition("=")[0] for flag in flags.split()}
    added = [f"{name}={value}" for name, value in wanted.items() if name not in present]
    return " ".join([*flags.split(), *added])


def set_threads(env: MutableMapping[str, str], processes_here: int, threads: int | None = None) -> None:
    """Sets the threads of XLA and of other libraries in one of `processes_here`; threads: as in `prepare`.

    XLA sizes its pool by NPROC: one thread per device or its blocking collectives starve each other.
    More than this process's share of the cores costs speed (2 cores: 88 k samples/s with 8, 115 k with 2),
    so it is raised no further than needed. CYXJAX_NPROC marks a value that is ours to raise,
    of an earlier group of this process or of the process that started it.
    XLA's libraries split sums by the size of their pool, so an exact run has one size everywhere.
    """
    share, devices = thread_share(processes_here), read_int(env, "JAX_NUM_CPU_DEVICES", 1)
    env.setdefault("OMP_NUM_THREADS", str(share))
    wanted = str(max(share, devices) if threads is None else threads)
    if "NPROC" not in env or env["NPROC"] == env.get("CYXJAX_NPROC"):
        if threads is not None and env.get("NPROC") != wanted:
            jax_private.refuse_started_backend(f"threads={threads}")
        env["NPROC"] = env["CYXJAX_NPROC"] = wanted
    elif threads is not None and env["NPROC"] != wanted:
        raise ConfigError(
            f"NPROC={env['NPROC']} (from the environment), but this exact run computes with {threads} CPU "
            "threads per process: a different number gives different bits. HINT: unset NPROC, or set "
            "exact_threads to it, the same in every process and at every resume."
        )


def pool_threads(devices: int, env: Mapping[str, str] = os.environ) -> int:
    """CPU threads of XLA's pool in a process with this many devices."""
    return max(read_int(env, "NPROC", len(os.sched_getaffinity(0))), devices)


def _keep_off_proxies(env: MutableMapping[str, str], host: str) -> None:
    """Keeps gRPC from connecting to jax's coordinator through http_proxy, which would hang."""
    if any(name.lower().endswith("_proxy") for name in env):
        hosts = [part for part in env.get("no_grpc_proxy", env.get("no_proxy", "")).split(",") if part]
        env["no_grpc_proxy"] = ",".join([*hosts, *({host, "127.0.0.1"} - set(hosts))])


def _configure_loaded_jax(cpu_devices: int) -> None:
    """An imported jax has already read its variables; its config still counts until a backend runs."""
    jax = sys.modules.get("jax")
    if jax is None or jax.config.jax_num_cpu_devices == cpu_devices:
        return
    jax_private.refuse_started_backend(f"cpu_devices={cpu_devices}")
    jax.config.update("jax_num_cpu_devices", cpu_devices)
