"""The checks of `cyxjax doctor` for a group: pure functions of the facts that all ranks sent."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cyxjax.cli.machine_checks import Check
from cyxjax.data.content import find_difference
from cyxjax.launch.group.roster import disagreement, ranks_text

_LOW_BYTES = 1 << 30
_CLOCK_S = 1.0  # beyond it the times in logs and records of two hosts tell a wrong order
_SHOWN = 3  # findings of one kind; more say the same

Facts = Mapping[str, Any]


def judge(ranks: Sequence[Facts]) -> Iterator[Check]:
    """Rows of a group. ranks: what each rank found (`group_doctor`), by rank."""
    yield _hosts(ranks)
    yield from _or_ok(_names(ranks), "names", "every host name resolves to its host on the other hosts")
    yield from _or_ok(_reach(ranks), "ports", "every rank was reached on a port of its own")
    yield _clocks(ranks)
    yield from _versions(ranks)
    yield from _run(ranks)
    yield _equal("devices", "the number of devices", [str(r["devices"]) for r in ranks], "warn")
    yield _least(
        "memory", "memory", ranks, "memory_bytes", "fewer processes on that host, or a smaller batch_size"
    )
    yield _least(
        "disk", f"disk in {ranks[0]['folder']}", ranks, "disk_bytes", "free space, or set run_dir elsewhere"
    )
    yield from _folder(ranks)


def _or_ok(found: Iterator[Check], topic: str, text: str) -> list[Check]:
    return list(found)[:_SHOWN] or [Check("ok", topic, text)]


def _hosts(ranks: Sequence[Facts]) -> Check:
    hosts: dict[str, list[int | str]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts["host"], []).append(rank)
    here = "; ".join(f"{host}: {ranks_text(who)}" for host, who in hosts.items())
    return Check("ok", "group", f"{len(ranks)} ranks on {len(hosts)} hosts met with the same code: {here}")


def _names(ranks: Sequence[Facts]) -> Iterator[Check]:
    """seen: by rank, what its host's name led to."""
    for rank, facts in enumerate(ranks):
        for other, seen in facts["seen"].items():
            host, address = ranks[int(other)]["host"], ranks[int(other)]["address"]
            if host == facts["host"]:
                continue
            if address not in seen["addresses"]:
                led = ", ".join(seen["addresses"]) or "nowhere"
                yield Check(
                    "warn",
                    "names",
                    f"on rank {rank} the name {host} leads to {led}, not to {address}. "
                    "HINT: correct /etc/hosts or DNS there, or give addresses (MASTER_ADDR=IP).",
                )


def _reach(ranks: Sequence[Facts]) -> Iterator[Check]:
    for rank, facts in enumerate(ranks):
        for other, seen in facts["seen"].items():
            if seen["error"]:
                yield Check(
                    "FAIL",
                    "ports",
                    f"rank {rank} ({facts['host']}) cannot reach rank {other} at "
                    f"{ranks[int(other)]['address']}:{ranks[int(other)]['port']}: {seen['error']}. "
                    "HINT: open the ephemeral ports between the hosts (gloo and NCCL use any of them).",
                )


def _clocks(ranks: Sequence[Facts]) -> Check:
    """clock: (seconds ahead of rank 0, at most so far off)."""
    rank = max(range(len(ranks)), key=lambda r: abs(ranks[r]["clock"][0]) - ranks[r]["clock"][1])
    ahead_s, error_s = ranks[rank]["clock"]
    if abs(ahead_s) - error_s <= _CLOCK_S:
        return Check("ok", "clocks", f"within {max(abs(ahead_s), error_s):.3f} s of rank 0's")
    way = "ahead of" if ahead_s > 0 else "behind"
    return Check(
        "warn",
        "clocks",
        f"the clock of rank {rank} ({ranks[rank]['host']}) is {abs(ahead_s):.1f} s {way} rank 0's. "
        "HINT: run a time service there (chrony, ntpd).",
    )


def _versions(ranks: Sequence[Facts]) -> Iterator[Check]:
    names = dict.fromkeys(name for r in ranks for name in r["software"])
    odd = []
    for name in names:
        values = [r["software"].get(name, "not installed") for r in ranks]
        if len(set(values)) > 1:
            odd.append(Check("FAIL", "versions", disagreement(name, dict(enumerate(values)))))
    yield from odd or [Check("ok", "versions", f"{len(names)} packages are equal on all ranks")]


def _run(ranks: Sequence[Facts]) -> Iterator[Check]:
    """config: by key, and data: contents by name; of a `--config FILE`, else {}."""
    problems = [(rank, r["problem"]) for rank, r in enumerate(ranks) if r["problem"]]
    for rank, text in problems[:_SHOWN]:
        yield Check("FAIL", "config", f"on rank {rank}: {text}")
    if problems or not any(r["config"] for r in ranks):
        return
    keys = dict.fromkeys(key for r in ranks for key in r["config"])
    rows = [_equal("config", key, [r["config"].get(key, "(none)") for r in ranks]) for key in keys]
    odd = [row for row in rows if row.level != "ok"]
    yield from odd[:_SHOWN] or [Check("ok", "config", f"{len(keys)} keys are equal on all ranks")]
    yield from _data(ranks)


def _data(ranks: Sequence[Facts]) -> Iterator[Check]:
    for name, first in ranks[0]["data"].items():
        for rank, facts in enumerate(ranks):
            other = facts["data"].get(name, {"samples": 0, "records": {}})
            found = find_difference(first, other, to_the_bit=False)
            if found:
                what, mine, its = found
                yield Check(
                    "FAIL",
                    "data",
                    f"{name}: {what}: {mine} on rank 0, {its} on rank {rank}. "
                    "HINT: give every host the same files, in the same order.",
                )
                break
        else:
            yield Check("ok", "data", f"{name}: {first['samples']:,} samples, equal on all ranks")


def _equal(topic: str, what: str, values: Sequence[str], level: str = "FAIL") -> Check:
    if len(set(values)) > 1:
        return Check(level, topic, disagreement(what, dict(enumerate(values))))  # type: ignore[arg-type]
    return Check("ok", topic, f"{what}: {values[0]} on each rank")


def _least(topic: str, what: str, ranks: Sequence[Facts], key: str, remedy: str) -> Check:
    known = {rank: r[key] for rank, r in enumerate(ranks) if r[key] is not None}
    if not known:
        return Check("ok", topic, f"free {what}: unknown on this system")
    rank = min(known, key=lambda r: known[r])
    text = f"at least {known[rank] / 1e9:.1f} GB of {what} free, on rank {rank} ({ranks[rank]['host']})"
    if known[rank] < _LOW_BYTES:
        return Check("warn", topic, f"{text}. HINT: {remedy}.")
    return Check("ok", topic, text)


def _folder(ranks: Sequence[Facts]) -> Iterator[Check]:
    """files: what `own_file` and `others_files` found."""
    broken = [(rank, r["files"]["error"]) for rank, r in enumerate(ranks) if r["files"]["error"]]
    for rank, why in broken[:_SHOWN]:
        remedy = "HINT: set run_dir to a folder where files can be written, renamed, synced and locked."
        yield Check(
            "FAIL", "folder", f"rank {rank} ({ranks[rank]['host']}), {ranks[rank]['folder']}: {why}. {remedy}"
        )
    if broken:
        return
    blind = {rank: r["files"]["unseen"] for rank, r in enumerate(ranks) if r["files"]["unseen"]}
    loose = {rank: r["files"]["unlocked"] for rank, r in enumerate(ranks) if r["files"]["unlocked"]}
    if blind:
        rank, others = next(iter(blind.items()))
        yield Check(
            "warn",
            "folder",
            f"not shared: rank {rank} does not see what {ranks_text(others)} wrote to its run folder "
            f"({ranks[rank]['folder']}). "
            "HINT: set run_dir to a folder all hosts see; fsdp, zero1 and a restart on another host need it.",
        )
    elif loose:
        rank, others = next(iter(loose.items()))
        yield Check(
            "warn",
            "folder",
            f"a lock of {ranks_text(others)} does not hold rank {rank} off: two jobs could write one run. "
            "HINT: mount it with locks (NFS 4, or 3 without nolock).",
        )
    else:
        yield Check("ok", "folder", "shared by all ranks; rename, fsync and locks work there")
