"""One start of a job whose hosts come and go, as the census follows it, and what hosts tell of its end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cyxjax.launch import wire
from cyxjax.launch.door import Agent
from cyxjax.launch.records import ErrorRecord
from cyxjax.launch.report import first_of

FOLLOW_S = 2.0  # after a host failed: time for the ranks of the others to notice, and to say what they saw
_TOLD = ("rank", "type", "secondary", "exit_code", "host", "start", "step", "source", "at_s")


@dataclass(frozen=True)
class Ended:
    """How a start ended on one host: 'ok', 'preempted', 'left' or 'failed' with its first error."""

    how: str
    step: int = -1
    first: ErrorRecord | None = None


@dataclass
class Round:
    """One start of the group: who is in it, how it ended for them, and who came or went meanwhile.

    changed: the first thing that will give the group another size, in words. follow_by: when hosts that
    did not notice a failure elsewhere are told of it; None before a failure.
    """

    number: int
    members: list[Agent]
    ended: dict[Agent, Ended] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    changed: str = ""
    follow_by: float | None = None

    @property
    def running(self) -> list[Agent]:
        return [agent for agent in self.members if agent not in self.ended]

    @property
    def step(self) -> int:
        """The furthest step a host has told of."""
        return max(ended.step for ended in self.ended.values())

    @property
    def failure(self) -> ErrorRecord | None:
        """The error the others follow from; None when no host has failed."""
        records = [ended.first for ended in self.ended.values() if ended.first is not None]
        return first_of(records) if records else None

    def note_end(self, agent: Agent, message: wire.Message) -> None:
        """Files what `agent` tells of the end (see end_message)."""
        first = message.get("first")
        record = None if first is None else ErrorRecord(**first)
        self.ended[agent] = Ended(str(message["how"]), int(message.get("step", -1)), record)
        if record is not None and self.follow_by is None:
            self.follow_by = time.monotonic() + FOLLOW_S


@dataclass(frozen=True)
class Over:
    """The end of the job."""

    code: int
    why: str = ""


def end_message(number: int, how: str, step: int, records: Sequence[ErrorRecord]) -> wire.Message:
    """What an agent tells of the end of start `number`. Of its first error only what decisions need."""
    first = first_of(records) if records else None
    said = None
    if first is not None:
        said = {name: getattr(first, name) for name in _TOLD}
        why = first.message
        if first.type == "exit" and first.stderr_tail:  # it ended before our hooks could file its exception
            why = f"{why}: {first.stderr_tail[-1]}"
        # clocks of several hosts are only comparable as time of day
        said |= {"message": why[:2000], "at_monotonic_s": first.at_s}
    return {"ended": number, "how": how, "step": step, "first": said}


def told(record: ErrorRecord) -> str:
    """'rank 1 failed on host node-1: ValueError: boom (train.py:88 load)'."""
    return f"rank {record.rank} failed on host {record.host}: {record.summary}"
