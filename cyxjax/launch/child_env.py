"""The environment of a process that was started as a rank by our own code, and not by a launcher."""

import os
from collections.abc import Mapping, MutableMapping

from cyxjax.launch.topology import read_int


def rank_variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """torchrun's variables for one rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def hosted_variables(token: str) -> dict[str, str]:
    """What tells a rank that its parent holds the meeting place."""
    return {"CYXJAX_HOSTED": "1", "CYXJAX_TOKEN": token}


def enter(variables: Mapping[str, str], env: MutableMapping[str, str] = os.environ) -> None:
    """Makes `variables` this process's own; before jax starts its devices."""
    env.update(variables)


def first_rank_and_world(nprocs: int, env: Mapping[str, str] = os.environ) -> tuple[int, int, bool]:
    """(first rank here, world size, whether other hosts take part) for `nprocs` processes of this host.

    RANK and WORLD_SIZE in the environment say where this host's ranks begin among those of all hosts.
    """
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return 0, nprocs, False
    first, world_size = read_int(env, "RANK"), read_int(env, "WORLD_SIZE")
    return first, world_size, world_size > nprocs
