"""`cyxjax doctor` under a launcher: forms the group as a run would, and checks it.

Every rank collects facts about itself and its neighbours; rank 0 judges them (`group_checks`). Ranks talk
through the coordination service, so that a broken connection between two ranks can still be reported.
"""

import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cyxjax.cli.group_checks import judge, others_files, own_file, wires
from cyxjax.cli.machine_checks import Check
from cyxjax.errors import CyxjaxError
from cyxjax.launch.backend.pages import available_bytes
from cyxjax.launch.environment import here
from cyxjax.launch.group.ports import BACKLOG, resolve
from cyxjax.launch.program import software
from cyxjax.launch.topology import Topology
from cyxjax.redaction import redact

_DIAL_S = 3.0


def group_checks(config_words: Sequence[str], folder: Path) -> Iterator[Check]:
    """Rows about the group of this process, on every rank; all ranks must consume all of them.

    config_words: arguments of `cyxjax.train` to compare, or []. folder: run folder without a configuration.
    """
    from cyxjax.distributed import process_group
    from cyxjax.distributed.agreement import agree

    try:
        group = process_group.init()
    except CyxjaxError as err:
        yield Check("FAIL", "group", redact(str(err)))
        return
    run = read_run(config_words)
    place = Path(run.pop("run_dir", folder))
    rank = group.topology.rank
    with socket.create_server(("", 0), backlog=BACKLOG) as listener, own_file(place, rank) as (broken, name):
        mine = own_facts(group.topology, listener.getsockname()[1], place) | run
        ranks = agree(group, "doctor: what each rank is", note=mine)
        asked_s = time.time()
        names = agree(group, "doctor: names of files", note=name)
        clock = asked_s, time.time()
        wrong = look_around(rank, ranks)
        wrong |= {"folder": broken, "sharing": [*others_files(place, names, rank)]}
        found = agree(group, "doctor: what each rank sees", note=[wrong, clock])
    yield from judge(ranks, *zip(*found, strict=True))
    yield from wires(group)
    process_group.finalize()


def own_facts(topology: Topology, port: int, folder: Path) -> dict[str, Any]:
    """The facts of this rank, as plain values for JSON."""
    import jax

    return {
        "host": socket.gethostname(),
        "address": _own_address(topology),
        "port": port,
        "software": software(),
        "devices": {"the number of devices": str(jax.local_device_count())},
        "memory_bytes": available_bytes(),
        "disk_bytes": _free_disk(folder),
    }


def read_run(words: Sequence[str]) -> dict[str, Any]:
    """Configuration and data of an experiment, as ranks compare them, or the problem in reading them."""
    nothing: dict[str, Any] = {"config": {}, "data": {}, "problem": ""}
    if not words:
        return nothing
    from cyxjax.config.load import load_config
    from cyxjax.data.content import content_of
    from cyxjax.train.experiment import data_of
    from cyxjax.train.feeding.fit_data import is_loader
    from cyxjax.train.fingerprints import equal_on_ranks

    try:
        config = load_config(words, env=here())
        splits = data_of(config)
        parts = {"training data": splits.train, "validation data": splits.val}
        data = {name: content_of(part) for name, part in parts.items() if not is_loader(part) and len(part)}
        return {
            "config": equal_on_ranks(config.resolved()),
            "data": data,
            "problem": "",
            "run_dir": config.run_dir,
        }
    except CyxjaxError as err:
        return nothing | {"problem": redact(str(err))}


def _own_address(topology: Topology) -> str:
    """This host's address on the route to MASTER_ADDR."""
    try:
        family, where = resolve(topology.master_addr, topology.master_port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect(where)  # sends nothing
            return str(trial.getsockname()[0])
    except OSError:
        return ""


def _free_disk(folder: Path) -> int:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def neighbours(rank: int, world_size: int) -> list[int]:
    """Ranks that `rank` connects to: all others in a small group, else those 1, 2, 4, ... ranks ahead."""
    steps = range(1, world_size) if world_size <= 16 else (1 << n for n in range(world_size.bit_length()))
    return sorted({(rank + step) % world_size for step in steps} - {rank})


def look_around(rank: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The problems with names and ports of the neighbours of `rank`."""
    wrong: dict[str, list[str]] = {"names": [], "ports": []}
    host = ranks[rank]["host"]
    for other in neighbours(rank, len(ranks)):
        its = ranks[other]
        if error := dial(its["address"], its["port"]):
            wrong["ports"].append(
                f"rank {rank} ({host}) cannot reach rank {other} at {its['address']}:{its['port']}: {error}. "
                "HINT: open the ephemeral ports between the hosts (gloo and NCCL use any of them)."
            )
        addresses = _addresses(its["host"])
        if its["host"] != host and its["address"] not in addresses:
            wrong["names"].append(
                f"on rank {rank} {its['host']} resolves to {', '.join(addresses) or 'nothing'}, "
                f"not to {its['address']}. "
                "HINT: correct /etc/hosts or DNS there, or give addresses (MASTER_ADDR=IP)."
            )
    return wrong


def dial(address: str, port: int) -> str:
    """The reason why a connection fails; "" if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=_DIAL_S).close()
    except OSError as err:
        return err.strerror or str(err)
    return ""


def _addresses(host: str) -> list[str]:
    try:
        return [where[0] for _, where in resolve(host, 0)]
    except OSError:
        return []
