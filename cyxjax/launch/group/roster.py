"""The roster of a job: who is here, who is missing, and whom to refuse. Pure bookkeeping, no sockets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyxjax.errors import ConfigError
from cyxjax.launch.group.protocol import printable


@dataclass(frozen=True)
class Job:
    """What every rank must agree on before it may join.

    generation: number of the start. is_led: launchers start the ranks, so a rank of an earlier start is late.
    """

    world_size: int
    run_id: str = ""
    generation: int = 0
    timeout_s: float = 30.0
    is_led: bool = False


@dataclass(frozen=True)
class Hello:
    """What a rank sends of itself when it joins. `facts` must be equal on all ranks (versions, config)."""

    rank: int
    world_size: int
    run_id: str = ""
    generation: int = 0
    host: str = ""
    pid: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @classmethod
    def parse(cls, message: Mapping[str, object]) -> "Hello":
        """The Hello in a message from the wire, its texts fit for a log.

        Raises: ConfigError for a missing or mistyped field.
        """
        wanted = [name for name, type_ in _FIELDS.items() if type(message.get(name)) is not type_]
        if wanted:
            raise ConfigError(
                f"a hello without a proper {', '.join(wanted)}. HINT: use one version of cyxjax."
            )
        values = {name: message[name] for name in _FIELDS}
        facts: dict[str, object] = values["facts"]  # type: ignore[assignment]
        values["facts"] = {printable(name): printable(value) for name, value in facts.items()}
        values["host"] = printable(message["host"], 255)
        return cls(**values)  # type: ignore[arg-type]


_FIELDS = {
    "rank": int,
    "world_size": int,
    "run_id": str,
    "generation": int,
    "host": str,
    "pid": int,
    "facts": dict,
}


class Roster:
    """Who has arrived. `gone` holds ranks that arrived and left before everybody was there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.present: dict[int, Hello] = {}
        self.gone: dict[int, Hello] = {}

    def refusal(self, hello: Hello) -> str | None:
        """Why `hello` may not enter; None when it may."""
        job = self.job
        if hello.run_id != job.run_id:
            return (
                f"this port belongs to job {job.run_id or '(unnamed)'!r}, {hello} is of job "
                f"{hello.run_id or '(unnamed)'!r}. HINT: give each job its own MASTER_PORT."
            )
        if hello.world_size != job.world_size:
            return disagreement("WORLD_SIZE", {hello.rank: hello.world_size, "the others": job.world_size})
        if not 0 <= hello.rank < job.world_size:
            return f"{hello} is outside WORLD_SIZE={job.world_size}. HINT: ranks are 0 to WORLD_SIZE - 1."
        if hello.rank in self.present:
            return (
                f"RANK={hello.rank} is taken: {self.present[hello.rank]} was here before "
                f"host {hello.host}, pid {hello.pid}. "
                "HINT: give every process its own RANK; the job goes on untouched."
            )
        return None

    def add(self, hello: Hello) -> None:
        self.present[hello.rank] = hello
        self.gone.pop(hello.rank, None)

    def remove(self, rank: int) -> None:
        self.gone[rank] = self.present.pop(rank)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.job.world_size) if rank not in self.present]

    @property
    def complete(self) -> bool:
        return len(self.present) == self.job.world_size

    def awaited(self) -> str:
        """'ranks 2, 3 (never seen)', 'rank 1 (seen on host a, pid 7, then lost)', joined by 'and'."""
        never = [rank for rank in self.missing if rank not in self.gone]
        parts = [f"{ranks_text(never)} (never seen)"] if never else []
        parts += [
            f"rank {h.rank} (seen on host {h.host}, pid {h.pid}, then lost)" for h in self.gone.values()
        ]
        return " and ".join(parts)

    def here(self) -> str:
        """Which ranks are here, by host: 'ranks 0, 1 on a; rank 2 on b'."""
        hosts: dict[str, list[int]] = {}
        for rank in sorted(self.present):
            hosts.setdefault(self.present[rank].host, []).append(rank)
        return "; ".join(f"{ranks_text(ranks)} on {host}" for host, ranks in hosts.items()) or "nobody"

    def differing_fact(self) -> str | None:
        """The first fact on which ranks differ, with every value and who holds it; None when all agree."""
        names = sorted({name for hello in self.present.values() for name in hello.facts})
        for name in names:
            values = {rank: self.present[rank].facts.get(name, "(none)") for rank in sorted(self.present)}
            if len(set(values.values())) > 1:
                return disagreement(name, values)
        return None


def disagreement(what: str, values: Mapping[Any, object]) -> str:
    """'ranks differ in jax: 0.10.2 on ranks 0, 1; 0.10.3 on rank 2', with a hint."""
    holders: dict[str, list[int | str]] = {}
    for rank, value in values.items():
        holders.setdefault(str(value), []).append(rank)
    shown = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())
    return f"ranks differ in {what}: {shown}. HINT: start every rank with the same program and environment."


def ranks_text(ranks: Sequence[int | str]) -> str:
    """'rank 3', 'ranks 0-2, 5', or a name given instead of a rank."""
    numbers = sorted(rank for rank in ranks if isinstance(rank, int))
    names = [rank for rank in ranks if isinstance(rank, str)]
    if not numbers:
        return ", ".join(names)
    text = ", ".join(
        f"{a}-{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in _runs(numbers)
    )
    return ", ".join([("rank " if len(numbers) == 1 else "ranks ") + text, *names])


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return runs
