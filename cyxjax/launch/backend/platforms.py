"""The devices that a run may use: what was requested, and what jax started on."""

import os
import sys
from collections.abc import Mapping

from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch.environment import choose, visible_gpus
from cyxjax.launch.topology import Topology


def settle(topology: Topology, env: Mapping[str, str] = os.environ, root: str = "/") -> str:
    """'nccl' or 'gloo' for what `topology` wishes, on the host whose files lie in `root`.

    With `auto` and no NVIDIA GPU it is 'gloo', and jax finds the platform: a TPU, another GPU, the CPU.
    JAX_PLATFORMS=cpu means 'gloo'.
    Raises: ConfigError where JAX_PLATFORMS names CUDA and there is no GPU; as `choose` does.
    """
    said, gpus = platforms_said(env), visible_gpus(env, os.path.join(root, "dev"))
    wish = "gloo" if topology.backend == "auto" and said[:1] == ("cpu",) else topology.backend
    if said == ("cuda",) and not gpus:  # jax fails by a bare assertion
        raise ConfigError(
            "JAX_PLATFORMS=cuda, but no NVIDIA GPU was found on this host. HINT: unset JAX_PLATFORMS."
        )
    return choose(wish, sys.platform, bool(gpus))


def platforms_said(env: Mapping[str, str]) -> tuple[str, ...]:
    """The platforms that JAX_PLATFORMS, or a jax that is loaded already, was set to use; () for any."""
    text = env.get("JAX_PLATFORMS", "") or _told_to_jax()
    return tuple(part for part in text.lower().split(",") if part)


def _told_to_jax() -> str:
    """`cpu` if a program chose it in jax's configuration; only this: on a TPU host jax itself writes tpu."""
    loaded = sys.modules.get("jax")
    return "cpu" if loaded is not None and loaded.config.jax_platforms == "cpu" else ""


def check_started(
    topology: Topology, chosen: str, started: str, processes: int, env: Mapping[str, str] = os.environ
) -> str:
    """The backend that jax runs on, for people. started, processes: platform and owners of its devices.

    Raises: GroupError where a GPU lies idle, another platform is taken where the CPU was asked for, or jax
    runs on other processes than the group has.
    """
    said = env.get("JAX_PLATFORMS")
    because = f" (JAX_PLATFORMS={said})" if said else ""
    if chosen == "nccl" and started == "cpu":
        raise GroupError(
            f"this host has an NVIDIA GPU, but jax started on the CPU{because}. HINT: pip install "
            "'cyxjax[gpu]', or set DISTRIBUTED_BACKEND=cpu (backend='gloo') to train on the CPU on purpose."
        )
    if chosen == "gloo" and started != "cpu" and topology.backend != "auto":
        raise GroupError(
            f"jax started on {started}{because}; this group of {topology.world_size} is to train on the CPU. "
            "HINT: set JAX_PLATFORMS=cpu, or leave DISTRIBUTED_BACKEND out."
        )
    if processes != topology.world_size:
        raise GroupError(
            f"jax runs {processes} process(es), but {topology.names[1]}={topology.world_size} (from "
            f"{topology.source}). HINT: call init() before anything touches a jax device; on one of several "
            "hosts set RANK, WORLD_SIZE and MASTER_ADDR."
        )
    return chosen if chosen == "nccl" or started == "cpu" else started


def untried(backend: str) -> list[str]:
    """A line for a platform that cyxjax has never run on."""
    if backend in ("gloo", "nccl"):
        return []
    return [f"jax runs on {backend}: cyxjax was tested on CPUs and NVIDIA GPUs, and never ran on {backend}."]
