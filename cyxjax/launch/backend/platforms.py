"""Which devices a run may take: what was asked for, what this host has, and what jax then started on."""

import os
import sys
from collections.abc import Mapping

from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch.backend import accelerators
from cyxjax.launch.environment import choose, visible_gpus
from cyxjax.launch.topology import Topology


def settle(
    topology: Topology,
    env: Mapping[str, str] = os.environ,
    root: str = "/",
    installed: accelerators.Installed = accelerators.installed,
) -> str:
    """'nccl' or 'gloo' for what `topology` wishes, on this host.

    Who names no backend and has an accelerator we do not train on is told so: it would train on its CPU, or
    each host alone. JAX_PLATFORMS is the user's own word: `cpu` means gloo, another is left to jax, in one
    process.
    Raises: GroupError naming the accelerator; as `choose` does.
    """
    said = platforms_said(env)
    wish = "gloo" if topology.backend == "auto" and said[:1] == ("cpu",) else topology.backend
    if said == ("cuda",) and not visible_gpus(
        env, os.path.join(root, "dev")
    ):  # jax fails by a bare assertion
        raise ConfigError(
            "JAX_PLATFORMS=cuda, but no NVIDIA GPU was found on this host. HINT: unset JAX_PLATFORMS."
        )
    chosen = choose(wish, sys.platform, bool(visible_gpus(env, os.path.join(root, "dev"))))
    if chosen != "gloo" or wish != "auto":
        return chosen
    grouped = topology.world_size > 1 or "," in env.get("TPU_WORKER_HOSTNAMES", "")  # of a TPU pod's hosts
    for other in accelerators.found(root, installed):
        named = {other.platform.lower(), "gpu"} & set(said)
        if (named and grouped) or (not said and other.ready):
            raise GroupError(_not_trained_on(other))
    return chosen


def platforms_said(env: Mapping[str, str]) -> tuple[str, ...]:
    """The platforms that JAX_PLATFORMS, or a jax that is loaded already, was told to use; () for any."""
    text = env.get("JAX_PLATFORMS", "") or _told_to_jax()
    return tuple(part for part in text.lower().split(",") if part)


def _told_to_jax() -> str:
    """`cpu` if a program chose it in jax's configuration; only this: on a TPU host jax itself writes tpu."""
    loaded = sys.modules.get("jax")
    return "cpu" if loaded is not None and loaded.config.jax_platforms == "cpu" else ""


def _not_trained_on(other: accelerators.Accelerator) -> str:
    return (
        f"this host has a {other.name} ({other.sign}), which cyxjax does not train on yet. HINT: set "
        "DISTRIBUTED_BACKEND=cpu (backend='gloo') to train on the CPU on purpose; in one process "
        f"JAX_PLATFORMS={other.platform} leaves it to jax, untested."
    )


def check_started(topology: Topology, chosen: str, started: str, env: Mapping[str, str] = os.environ) -> None:
    """Whether jax runs on what was chosen. started: the platform of its devices (cpu, gpu, tpu, ...).

    Raises: GroupError where a GPU or another accelerator lies idle, or is taken where the CPU was asked for.
    """
    said = env.get("JAX_PLATFORMS")
    because = f" (JAX_PLATFORMS={said})" if said else ""
    if chosen == "nccl" and started == "cpu":
        raise GroupError(
            f"this host has an NVIDIA GPU, but jax started on the CPU{because}. HINT: pip install "
            "'cyxjax[gpu]', or set DISTRIBUTED_BACKEND=cpu (backend='gloo') to train on the CPU on purpose."
        )
    alone = topology.world_size == 1 and topology.backend == "auto"
    if chosen == "gloo" and started != "cpu" and not alone:
        raise GroupError(
            f"jax started on {started}{because}; this group of {topology.world_size} is to train on the CPU. "
            "HINT: set JAX_PLATFORMS=cpu, or leave DISTRIBUTED_BACKEND out and start one process."
        )


def idle_accelerators(backend: str, asked: str, env: Mapping[str, str], root: str = "/") -> list[str]:
    """A line for each accelerator that this host has and jax no plugin for: the run goes on without it."""
    if backend != "gloo" or asked != "auto" or platforms_said(env):
        return []
    return [
        f"this host has a {other.name} ({other.sign}), but jax no plugin for it: training on the CPU. "
        "HINT: DISTRIBUTED_BACKEND=cpu says so on purpose."
        for other in accelerators.found(root)
    ]
