"""The checks of `cyxjax doctor` for a group: rank 0 judges what all ranks found.

The group is also tested: with files in the run folder, and with all-reduces.
"""

import fcntl
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cyxjax.cli.machine_checks import Check
from cyxjax.data.content import find_difference
from cyxjax.files import try_flock, write_whole
from cyxjax.launch.output import ranks_text, unequal_facts

_LOW_BYTES = 1 << 30
_CLOCK_S = 1.0  # a larger difference makes the order of events in the logs of two hosts wrong
_SHOWN = 3  # findings of one kind; more would repeat them
_ROOM = {
    "memory": "fewer processes on that host, or a smaller batch_size",
    "disk": "free space, or set run_dir elsewhere",
}

_SIZES = (4, 64_000, 1_000_000, 16_000_000)  # bytes of the arrays that are reduced
_TIMES = 7  # measurements per size, of which the median is used

Facts = Mapping[str, Any]


def judge(
    ranks: Sequence[Facts],
    wrong: Sequence[Mapping[str, Sequence[str]]],
    clocks: Sequence[tuple[float, float]],
) -> Iterator[Check]:
    """Rows about a group. ranks: the facts of each rank; wrong: the problems it found, by topic.

    clocks: when each rank began an exchange with all others, and when it ended, by its own clock.
    """
    found = {topic: [text for one in wrong for text in one[topic]] for topic in wrong[0]}
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts["host"], []).append(rank)
    here = "; ".join(f"{host}: {ranks_text(who)}" for host, who in hosts.items())
    yield Check("ok", "group", f"{len(ranks)} ranks on {len(hosts)} hosts met with the same code: {here}")
    yield from _rows("names", "warn", found["names"], "every host name resolves to its host on other hosts")
    yield from _rows("ports", "FAIL", found["ports"], "every rank was reached on its own port")
    yield from _rows("clocks", "warn", _wrong_clocks(clocks), "the clocks of all hosts agree with rank 0's")
    yield from _rows("versions", "FAIL", _unequal(ranks, "software"), "packages are the same on all ranks")
    yield from _run(ranks)
    yield from _rows("devices", "warn", _unequal(ranks, "devices"), "the same number on each rank")
    for topic, remedy in _ROOM.items():
        yield _least(ranks, topic, remedy)
    if found["folder"]:
        yield from _rows("folder", "FAIL", found["folder"], "")
    else:
        fine = "shared by all ranks; rename, fsync and locks work there"
        yield from _rows("folder", "warn", found["sharing"][:1], fine)


def _rows(topic: str, level: Literal["warn", "FAIL"], wrong: Iterable[str], fine: str) -> Iterable[Check]:
    """A row for each of the first problems in `wrong`, or one `ok` row."""
    return [Check(level, topic, text) for text in islice(wrong, _SHOWN)] or [Check("ok", topic, fine)]


def _wrong_clocks(clocks: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Clocks that are certainly ahead of rank 0's or behind it: each rank begins before any other ends."""
    began_s, ended_s = clocks[0]
    for rank, (its_began_s, its_ended_s) in enumerate(clocks):
        ahead_s, behind_s = its_began_s - ended_s, began_s - its_ended_s
        if max(ahead_s, behind_s) > _CLOCK_S:
            side = "ahead of" if ahead_s > behind_s else "behind"
            yield (
                f"the clock of rank {rank} is at least {max(ahead_s, behind_s):.1f} s {side} rank 0's. "
                "HINT: run a time service on its host (chrony, ntpd)."
            )


def _unequal(ranks: Sequence[Facts], fact: str) -> Iterator[str]:
    """The differences in a fact that is a dict of named values."""
    return unequal_facts({rank: facts[fact] for rank, facts in enumerate(ranks)})


def _run(ranks: Sequence[Facts]) -> Iterator[Check]:
    """Compares configuration keys and data contents; no rows without a `--config FILE`."""
    problems = [f"on rank {rank}: {facts['problem']}" for rank, facts in enumerate(ranks) if facts["problem"]]
    if problems or any(facts["config"] for facts in ranks):
        wrong = problems or _unequal(ranks, "config")
        yield from _rows("config", "FAIL", wrong, "all keys are the same on all ranks")
    for name, first in ranks[0]["data"].items() if not problems else ():
        fine = f"{name}: {first['samples']:,} samples, the same on all ranks"
        yield from _rows("data", "FAIL", islice(_other_data(ranks, name, first), 1), fine)


def _other_data(ranks: Sequence[Facts], name: str, first: Facts) -> Iterator[str]:
    for rank, facts in enumerate(ranks):
        theirs = facts["data"].get(name, {"samples": 0, "records": {}})
        if found := find_difference(first, theirs, to_the_bit=False):
            what, mine, its = found
            yield (
                f"{name}: {what}: {mine} on rank 0, {its} on rank {rank}. "
                "HINT: give every host the same files, in the same order."
            )


def _least(ranks: Sequence[Facts], topic: str, remedy: str) -> Check:
    free = {rank: facts[f"{topic}_bytes"] for rank, facts in enumerate(ranks)}
    rank = min(free, key=lambda rank: free[rank])
    text = f"at least {free[rank] / 1e9:.1f} GB of {topic} free, on rank {rank} ({ranks[rank]['host']})"
    is_low = free[rank] < _LOW_BYTES
    return Check("warn", topic, f"{text}. HINT: {remedy}.") if is_low else Check("ok", topic, text)


@contextmanager
def own_file(folder: Path, rank: int) -> Iterator[tuple[list[str], str]]:
    """(what went wrong, name of our file in `folder`), which is written as checkpoints are, and locked.

    A missing folder is created, and removed at the end if it is empty.
    """
    made = [p for p in (folder.absolute(), *folder.absolute().parents) if not p.exists()]
    host = os.uname().nodename
    name = f".doctor-{host}-{os.getpid()}-{rank}"
    wrong, held = [], -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # 106 kB: more than a file system stores with the name
        write_whole(folder / name, b"cyxjax doctor" * 8192, mode=0o600)
        held = os.open(folder / name, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        wrong.append(
            f"rank {rank} ({host}), {folder}: {err.strerror or err}. "
            "HINT: set run_dir to a folder where files can be written, renamed, synced and locked."
        )
    try:
        yield wrong, name
    finally:
        if held >= 0:
            os.close(held)
        (folder / name).unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def others_files(folder: Path, names: Sequence[str], rank: int) -> Iterator[str]:
    """What is wrong with the files of the other ranks in `folder`, as `rank` sees it."""
    unseen, unlocked = [], []
    for other, name in enumerate(names):
        if other == rank:
            continue
        try:
            theirs = os.open(folder / name, os.O_RDWR)
        except OSError:
            unseen.append(other)
            continue
        if try_flock(theirs):
            unlocked.append(other)
        os.close(theirs)
    if unseen:
        yield (
            f"not shared: rank {rank} does not see what {ranks_text(unseen)} wrote to its run folder "
            f"({folder}). "
            "HINT: set run_dir to a shared folder; fsdp, zero1 and a restart on another host need one."
        )
    if unlocked:
        yield (
            f"a lock of {ranks_text(unlocked)} does not exclude rank {rank}: two jobs could write to one "
            "run. HINT: mount it with locks (NFS 4, or 3 without nolock)."
        )


def wires(group: Any) -> Iterator[Check]:
    """Latency and bandwidth of the all-reduce that training uses, by size."""
    import jax
    from jax.sharding import PartitionSpec

    from cyxjax.core.mesh import PER_REPLICA, local_replicas, put_rows
    from cyxjax.core.replica import psum, sync_map
    from cyxjax.files import scaled

    mesh = group.mesh
    reduce = jax.jit(sync_map(lambda rows: psum(rows[0]), mesh, PER_REPLICA, PartitionSpec()))
    times = []
    for num_bytes in _SIZES:
        rows = put_rows(mesh, np.ones((len(local_replicas(mesh)), num_bytes // 4), np.float32))
        total = np.asarray(reduce(rows).addressable_data(0))
        if not (total == mesh.size).all():
            wrong = f"{mesh.size} ones add up to {total[total != mesh.size][0]:g} ({num_bytes:,} bytes)"
            yield Check("FAIL", "wires", f"{wrong}. HINT: check the network cards and drivers of the hosts.")
            return
        spent_s = statistics.median(_timed(reduce, rows) for _ in range(_TIMES))
        times.append(
            f"{scaled(num_bytes, 'B')} {1e3 * spent_s:.2f} ms ({num_bytes / spent_s / 1e6:,.1f} MB/s)"
        )
    yield Check("ok", "wires", f"all-reduce over {group.backend}: {', '.join(times)}")


def _timed(reduce: Any, rows: Any) -> float:
    began = time.perf_counter()
    reduce(rows).block_until_ready()
    return time.perf_counter() - began
