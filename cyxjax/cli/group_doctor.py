"""`cyxjax doctor` under a launcher: forms the group as a run would, and checks it.

Every rank finds facts of its own and of its neighbours; rank 0 judges them (`group_checks`). Ranks talk
through the coordination service, so that what is broken between two of them can still be told.
"""

import shutil
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cyxjax.cli.group_checks import judge, others_files, own_file, two_steps, wires
from cyxjax.cli.machine_checks import Check
from cyxjax.errors import CyxjaxError
from cyxjax.files import redact
from cyxjax.launch.backend.pages import available_bytes
from cyxjax.launch.environment import here
from cyxjax.launch.group.ports import resolve
from cyxjax.launch.program import software
from cyxjax.launch.topology import Topology

_DIAL_S = 3.0
_PINGS = 5
_CLOCK_S = 1.0  # beyond it the times in logs and records of two hosts tell a wrong order


def group_checks(config_words: Sequence[str], folder: Path) -> Iterator[Check]:
    """Rows about the group this process belongs to, on every rank; all ranks must go through them.

    config_words: of `cyxjax.train`, to compare; [] for none. folder: where runs go, without a configuration.
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
    with clock() as port:
        mine = own_facts(group.topology, port, place) | run
        ranks = agree(group, "doctor: what each rank is", note=mine)
        wrong = look_around(group.topology.rank, ranks)
        with own_file(place, group.topology.rank) as (broken, name):
            names = agree(group, "doctor: names of files", note=name)
            wrong |= {"folder": broken, "sharing": [*others_files(place, names, group.topology.rank)]}
            found = agree(group, "doctor: what each rank sees", note=wrong)
    yield from judge(ranks, found)
    yield from wires(group)
    yield two_steps(group)
    process_group.finalize()


def own_facts(topology: Topology, port: int, folder: Path) -> dict[str, Any]:
    """What this rank says of itself; JSON."""
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
    """Configuration and data of an experiment, as ranks compare them; why they cannot be read."""
    nothing: dict[str, Any] = {"config": {}, "data": {}, "problem": ""}
    if not words:
        return nothing
    from cyxjax.config.load import load_config
    from cyxjax.data.content import content_of
    from cyxjax.data.sources import Dataset
    from cyxjax.train.fingerprints import equal_on_ranks
    from cyxjax.train.start.named import data_of

    try:
        config = load_config(words, env=here())
        splits = data_of(config)
        parts = {"training data": splits.train, "validation data": splits.val}
        data = {
            name: content_of(part) for name, part in parts.items() if isinstance(part, Dataset) and len(part)
        }
        return {
            "config": equal_on_ranks(config.resolved()),
            "data": data,
            "problem": "",
            "run_dir": config.run_dir,
        }
    except CyxjaxError as err:
        return nothing | {"problem": redact(str(err))}


def _own_address(topology: Topology) -> str:
    """This host's address on the way to the meeting place."""
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


@contextmanager
def clock(now: Callable[[], float] = time.time) -> Iterator[int]:
    """The port on which each byte is answered with the time here, while the block runs. now: for tests."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(60)
            with suppress(OSError):
                while self.request.recv(1):
                    self.request.sendall(struct.pack("!d", now()))

    with socketserver.ThreadingTCPServer(("", 0), Answer) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


def neighbours(rank: int, world_size: int) -> list[int]:
    """Ranks that `rank` dials: all of a small group, else those 1, 2, 4, ... further on. 0 has the clock."""
    steps = range(1, world_size) if world_size <= 16 else (1 << n for n in range(world_size.bit_length()))
    found = {(rank + step) % world_size for step in steps} | {0}
    return sorted(found - {rank})


def look_around(rank: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What is wrong with names, ports and clocks, as `rank` sees its neighbours."""
    wrong: dict[str, list[str]] = {"names": [], "ports": [], "clocks": []}
    host = ranks[rank]["host"]
    for other in neighbours(rank, len(ranks)):
        its = ranks[other]
        error, clock = ping(its["address"], its["port"])
        if error:
            wrong["ports"].append(
                f"rank {rank} ({host}) cannot reach rank {other} at {its['address']}:{its['port']}: {error}. "
                "HINT: open the ephemeral ports between the hosts (gloo and NCCL use any of them)."
            )
        addresses = _addresses(its["host"])
        if its["host"] != host and its["address"] not in addresses:
            wrong["names"].append(
                f"on rank {rank} {its['host']} leads to {', '.join(addresses) or 'nowhere'}, "
                f"not to {its['address']}. "
                "HINT: correct /etc/hosts or DNS there, or give addresses (MASTER_ADDR=IP)."
            )
        if other == 0 and clock is not None and abs(clock[0]) - clock[1] > _CLOCK_S:
            wrong["clocks"].append(
                f"the clock of rank {rank} ({host}) is {clock[0]:+.1f} s from rank 0's. "
                "HINT: run a time service there (chrony, ntpd)."
            )
    return wrong


def ping(address: str, port: int) -> tuple[str, tuple[float, float] | None]:
    """(what went wrong or "", how many seconds our clock is ahead of the other's, and at most so far off).

    Source: Cristian 1989, doi:10.1007/BF01784024: half of the quickest round trip bounds the error.
    """
    best: tuple[float, float] | None = None
    try:
        with socket.create_connection((address, port), timeout=_DIAL_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                began, sent = time.monotonic(), time.time()
                connection.sendall(b".")
                (there,) = struct.unpack("!d", connection.recv(8, socket.MSG_WAITALL))
                half_s = (time.monotonic() - began) / 2
                if best is None or half_s < best[1]:
                    best = (sent + half_s - there, half_s)
    except struct.error:
        return "it closed the connection", None
    except OSError as err:
        return err.strerror or str(err) or type(err).__name__, None
    return "", best


def _addresses(host: str) -> list[str]:
    try:
        return [where[0] for _, where in resolve(host, 0)]
    except OSError:
        return []
