"""Two ranks as two Ray tasks, each on a node with enough free CPUs.   Start: python scripts/ray/digits.py

Ray chooses the nodes; the ranks then connect to each other with the variables of `rank_environment`.
"""

import os
import secrets
import socket
import subprocess
import sys

RANKS, CPUS = 2, 4
COMMAND = [sys.executable, "-m", "cyxjax.train", "--config", "configs/digits.yaml"]


def rank_environment(rank: int, world_size: int, address: str, port: int, token: str) -> dict[str, str]:
    """The variables with which a rank finds the others. Rank 0 must run on the host of `address`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "CYXJAX_TOKEN": token,
        "DISTRIBUTED_TIMEOUT_MS": "300000",  # tasks wait for free CPUs
    }


def run_rank(environment: dict[str, str], command: list[str]) -> int:
    """The exit code of one rank, which runs in its own process, separate from Ray's."""
    return subprocess.run(command, env=os.environ | environment, check=False).returncode


def meeting_place() -> tuple[str, int]:
    """(address, free port) of the host on which this runs."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), int(probe.getsockname()[1])


def main() -> int:
    import ray  # only here, so that the functions above can be used and tested without it
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init()
    group = placement_group([{"CPU": CPUS}] * RANKS, strategy="SPREAD")
    ray.get(group.ready())

    def on(bundle: int) -> dict[str, object]:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return {"num_cpus": CPUS, "scheduling_strategy": place, "max_retries": 0}

    address, port = ray.get(ray.remote(meeting_place).options(**on(0)).remote())
    token = secrets.token_hex(32)
    ranks = [
        ray.remote(run_rank)
        .options(**on(k))
        .remote(rank_environment(k, RANKS, address, port, token), COMMAND)
        for k in range(RANKS)
    ]
    return max(ray.get(ranks))


if __name__ == "__main__":
    sys.exit(main())
