"""`cyxjax env`: which place in a group this process would take, and who says so."""

import sys
from collections.abc import Mapping, Sequence

from cyxjax.errors import ConfigError
from cyxjax.launch import accelerators, environment
from cyxjax.launch.clusters import claims
from cyxjax.launch.topology import Topology


def main(argv: Sequence[str]) -> int:
    """Prints the place found in the environment; exit code 0. Raises: ConfigError for a bad environment."""
    if argv and argv[0] not in ("-h", "--help"):
        raise ConfigError(
            f"cyxjax env takes no arguments, got {argv[0]!r}. HINT: set the variables before it."
        )
    if argv:
        print("usage: cyxjax env\n\nShows rank, world size, address and backend, and who says so.")
        return 0
    print("\n".join(describe_place(environment.here())))
    return 0


def describe_place(env: Mapping[str, str]) -> list[str]:
    """Lines for people: the place, its source, the wires, and what else claims a place."""
    first, *others = claims(env)
    gpus = environment.visible_gpus(env)
    wires = environment.choose(first.backend, sys.platform, bool(gpus))
    lines = [
        f"source      {_source(first, env)}",
        f"rank        {first.rank} of {first.world_size} (local rank {first.local_rank})",
        f"meets at    {first.master_addr}:{first.master_port}, waits {first.timeout_ms / 1000:g} s",
        f"backend     {wires} (asked for: {first.backend}; visible GPUs: {len(gpus)})",
    ]
    lines += [f"also says   {_source(other, env)}: the same place" for other in others]
    lines += [f"has         a {other.name} ({other.sign}), not trained on" for other in accelerators.found()]
    lines += [f"note        {text}" for text in _notes(first, wires, env)]
    return lines


def _source(topology: Topology, env: Mapping[str, str]) -> str:
    given = ", ".join(f"{name}={env[name]}" for name in topology.names if name in env)
    return f"{topology.source} ({given})" if given else topology.source


def _notes(topology: Topology, wires: str, env: Mapping[str, str]) -> list[str]:
    advice = environment.advice(wires, sys.platform, topology.world_size, topology.local_world_size)
    return [*environment.explain(env, wires), *([advice] if advice else [])]
