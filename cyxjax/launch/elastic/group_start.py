"""One start of a group of hosts: who is in it, and what they tell of its end."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.failure.report import first_of
from cyxjax.launch.group import protocol

FOLLOW_S = 2.0  # after a host failed: time for the ranks of the others to notice, and to say what they saw
_TOLD = ("rank", "type", "secondary", "exit_code", "host", "start", "step", "source", "at_s")


class Member(Protocol):
    """A host of the job, as the first one knows it. `is_first`: the one of rank 0."""

    @property
    def host(self) -> str: ...
    @property
    def nproc(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    def send(self, message: protocol.Message) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Ended:
    """How a start ended on one host: 'ok', 'preempted', 'left' or 'failed' with its first error."""

    how: str
    step: int = -1
    first: ErrorRecord | None = None


@dataclass
class GroupStart:
    """One start of the group: who is in it, how it ended for them, and who came or went meanwhile.

    changed: the first thing that will give the group another size, in words. follow_by: when hosts that
    did not notice a failure elsewhere are told of it; None before a failure. ordered: all were told to end.
    """

    number: int
    members: list[Member]
    ended: dict[Member, Ended] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    changed: str = ""
    follow_by: float | None = None
    ordered: bool = False
    now: Callable[[], float] = lambda: time.monotonic()

    def __post_init__(self) -> None:
        self._running = dict.fromkeys(self.members)  # a look-up for each of thousands of hosts

    @property
    def running(self) -> list[Member]:
        return list(self._running)

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def has(self, agent: Member) -> bool:
        """Whether it takes part, or did until it told of its end."""
        return agent in self._running or agent in self.ended

    @property
    def step(self) -> int:
        """The furthest step a host has told of."""
        return max(ended.step for ended in self.ended.values())

    @property
    def failure(self) -> ErrorRecord | None:
        """The error the others follow from; None when no host has failed."""
        records = [ended.first for ended in self.ended.values() if ended.first is not None]
        return first_of(records) if records else None

    def note_end(self, agent: Member, message: protocol.Message) -> None:
        """Files what `agent` tells of the end (see end_message). Raises: ValueError where that is no end."""
        how, step, first = message.get("how"), message.get("step", -1), message.get("first")
        record = None if first is None else _record(first)
        if how not in ("ok", "preempted", "left", "failed") or type(step) is not int:
            raise ValueError(f"no end of a start: {how!r} at {step!r}")
        self.ended[agent] = Ended(how, step, record)
        self._running.pop(agent, None)
        if record is not None and self.follow_by is None:
            self.follow_by = self.now() + FOLLOW_S

    def note_loss(self, agent: Member) -> bool:
        """Leaves out a host that has gone; False where it took no part any more."""
        if agent not in self._running:
            return False
        del self._running[agent]
        self.members.remove(agent)
        self.lost.append(agent.host)
        return True


def end_message(number: int, how: str, step: int, records: Sequence[ErrorRecord]) -> protocol.Message:
    """What an agent tells of the end of start `number`. Of its first error only what decisions need."""
    first = first_of(records) if records else None
    said = None
    if first is not None:
        said = {name: getattr(first, name) for name in _TOLD}
        why = first.message
        if first.type == "exit" and first.stderr_tail:  # it ended before our hooks could file its exception
            why = f"{why}: {first.stderr_tail[-1]}"
        said |= {"message": why[:2000], "age_s": time.monotonic() - first.at_monotonic_s}
    return {"ended": number, "how": how, "step": step, "first": said}


def _record(said: object) -> ErrorRecord:
    """The error a host tells of, at its moment on this host's clock, its texts fit for a log.

    From its age, not from its time of day: a host with a wrong clock would get another rank blamed.
    Raises: ValueError.
    """
    if not isinstance(said, dict) or not said.keys() <= {*_TOLD, "message", "age_s"}:
        raise ValueError("an error record of another version")
    age_s = said.get("age_s")
    if type(age_s) not in (int, float):
        raise ValueError(f"an error record with age_s={age_s!r}")
    values: dict[str, Any] = {"rank": -1, "type": "", "message": ""} | said
    values["at_monotonic_s"] = time.monotonic() - float(values.pop("age_s"))
    record = ErrorRecord(**values)
    for name, proper in vars(ErrorRecord(0, "", "")).items():
        found = getattr(record, name)
        if type(found) is not type(proper) and not (type(found) is int and type(proper) is float):
            raise ValueError(f"an error record with {name}={found!r}")
        if isinstance(found, str):
            setattr(record, name, protocol.printable(found, keep="\n\t"))
    return record


def told(record: ErrorRecord) -> str:
    """'rank 1 failed on host node-1: ValueError: boom (train.py:88 load)'."""
    return f"rank {record.rank} failed on host {record.host}: {record.summary}"
