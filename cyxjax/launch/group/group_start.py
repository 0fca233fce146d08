"""One start of the ranks of a job: its hosts, how it ended on each, and whether it is started again."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, EXIT_SECONDARY, EXIT_USER_ERROR
from cyxjax.launch.failure.record import ErrorRecord, first_of
from cyxjax.launch.group.protocol import Message

NO_START = -1  # in place of a start's number where a host leaves between two starts
FOLLOW_S = 2.0  # after a host failed: time for the ranks of the others to notice and report it
# The fields of its first error that a host sends: those needed for decisions.
_SENT = ("rank", "type", "message", "secondary", "exit_code", "host", "start", "step", "at_s", "source")


@dataclass(eq=False)
class Member:
    """A host of the job. base_rank: its first rank; -1 if the controller assigns it. peer: its connection."""

    host: str
    base_rank: int = -1
    nproc: int = 1
    peer: Any = None

    @property
    def is_first(self) -> bool:
        """True on the host of rank 0, whose launcher holds the group's server."""
        return self.base_rank == 0


@dataclass
class GroupStart:
    """One start of the group: on which hosts it runs, how it ended on the others, and who was lost.

    running: in the order of their ranks. ended: how on each: ok, preempted, interrupted, left or failed.
    step: the furthest that a host has reported. changed: what changes the group's size, in words.
    follow_by: when hosts that have not noticed a failure elsewhere are ended. ordered: all were ordered to
    end immediately. answer_by: when those that have not done so are given up.
    """

    number: int
    running: dict[Member, None]  # a dict: thousands of hosts are looked up
    ended: dict[Member, str] = field(default_factory=dict)
    step: int = -1
    failures: list[ErrorRecord] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    changed: str = ""
    follow_by: float = math.inf
    ordered: bool = False
    answer_by: float = math.inf

    @property
    def num_hosts(self) -> int:
        """The number of hosts that take part, with those that have ended and without those that were lost."""
        return len(self.running) + len(self.ended)

    @property
    def failure(self) -> ErrorRecord | None:
        """The error that the start failed with; the loss of a host where no rank has one of its own."""
        first = first_of(self.failures) if self.failures else None
        if self.lost and (first is None or first.secondary):
            return ErrorRecord(
                -1, "HostLost", self.changed, True, EXIT_SECONDARY, self.lost[0], step=self.step
            )
        return first

    def note_end(self, host: Member, message: Message, now: float) -> None:
        """Records how the start ended on `host` (see end_message).

        The time of its error is computed from its age, not from the host's clock: with a wrong clock the
        wrong rank would be blamed. Raises: KeyError, TypeError, ValueError for a message of another version.
        """
        how, step = str(message["how"]), int(message["step"])
        if message["first"] is not None:
            age_s = float(message["age_s"])
            self.failures.append(ErrorRecord(**message["first"], at_monotonic_s=now - age_s))
            self.follow_by = min(self.follow_by, now + FOLLOW_S)
        self.ended[host], self.step = how, max(self.step, step)
        del self.running[host]

    def note_leaving(self, host: Member) -> None:
        """Records that `host` was asked to stop: before its ranks have begun, or after they have failed."""
        if host in self.running or self.ended.get(host, "ok") != "ok":
            self.running.pop(host, None)
            self.ended[host] = "left"

    def note_loss(self, host: Member) -> None:
        """Removes a host that is gone."""
        del self.running[host]
        self.lost.append(host.host)
        self.changed = f"host {host.host} is gone"


def end_message(number: int, how: str, step: int, first: ErrorRecord | None = None) -> Message:
    """What a host sends at the end of start `number`."""
    message: Message = {"ended": number, "how": how, "step": step, "first": None}
    if first is not None:
        record = {name: getattr(first, name) for name in _SENT}
        if first.type == "exit" and first.stderr_tail:  # it ended before our hooks could file its exception
            record["message"] += f": {first.stderr_tail[-1]}"
        record["message"] = record["message"][:2000]
        message |= {"first": record, "age_s": time.monotonic() - first.at_monotonic_s}
    return message


def describe(record: ErrorRecord) -> str:
    """'rank 1 failed on host node-1: ValueError: boom (train.py:88 load)'; for a lost host its message."""
    if record.rank < 0:
        return record.message
    return f"rank {record.rank} failed on host {record.host}: {record.summary}"


MAX_WITHOUT_PROGRESS = 3
MAX_DOUBLINGS = 6  # of a delay of 1 s


@dataclass(frozen=True)
class Decision:
    """What to do after a failed start, and why; the exit code counts when it is not started again."""

    again: bool
    line: str  # for the terminal: 'restart 1 of 3' or 'not started again: ...'
    delay_s: float = 0.0
    exit_code: int = EXIT_INFRASTRUCTURE


@dataclass
class Budget:
    """Remembers the failures of one job. `best_step` is the furthest step that any rank has reported."""

    max_restarts: int
    used: int = 0
    best_step: int = -1
    without_progress: int = 0
    signatures: set[tuple[str, str, str, int]] = field(default_factory=set)

    def decide(self, first: ErrorRecord, step: int, *, asked_to_end: bool = False) -> Decision:
        """What follows a start that ended with `first`, after the group had reached `step`.

        asked_to_end: a signal has asked the launcher to stop, so nothing is restarted.

        The first restart, and the first one after progress, are immediate; others wait 0.5, 1, 2 ... 64 s. If
        ranks report steps, the job ends after MAX_WITHOUT_PROGRESS restarts that came no further.
        """
        progressed = step > self.best_step and self.used > 0
        self.best_step = max(self.best_step, step)
        self.without_progress = 0 if progressed else self.without_progress + 1
        is_told = first.type != "exit" or first.step >= 0  # a bare exit code tells no error from another
        repeated = first.exit_code == EXIT_USER_ERROR and is_told and first.signature in self.signatures
        self.signatures.add(first.signature)
        why, code = "", first.exit_code
        if asked_to_end:
            why = "it was asked to end"
        elif code == EXIT_CONFIG:
            why = "a restart does not fix a configuration error"
        elif repeated:
            at = f" at step {first.step}" if first.step >= 0 else ""
            why = f"the same error{at} again: a restart does not fix it"
        elif self.max_restarts == 0:
            why = "--max-restarts is 0"
        elif self.used >= self.max_restarts:
            why, code = f"all {self.max_restarts} restarts are used", EXIT_INFRASTRUCTURE
        elif self.best_step >= 0 and self.without_progress > MAX_WITHOUT_PROGRESS:
            why = f"{MAX_WITHOUT_PROGRESS} restarts came no further than step {self.best_step}"
            code = EXIT_INFRASTRUCTURE
        if why:
            return Decision(False, f"not started again: {why}", exit_code=code)
        self.used += 1
        waits = self.used > 1 and self.without_progress > 0
        delay_s = 2.0 ** min(MAX_DOUBLINGS, self.without_progress - 2) if waits else 0.0
        return Decision(True, f"restart {self.used} of {self.max_restarts}", delay_s)
