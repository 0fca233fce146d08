"""One start of the group on this host, and how it ended."""

import time
from dataclasses import dataclass, field

from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.supervise.worker import Worker


@dataclass
class Start:
    """One start of the group on this host.

    deadline_s: when whoever still runs is killed. signalled, signalled_s: what asked it to end, and when;
    hurried: a later signal asked again. nudged: no signal but the group asked, which changes its size.
    detected_s: from a rank's last sign of life to when we knew of the failure. unheard: ranks that were asked
    to save before they could listen.
    """

    number: int
    workers: list[Worker]
    records: list[ErrorRecord] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    ended_early: list[int] = field(default_factory=list)
    deadline_s: float | None = None
    signalled: int | None = None
    signalled_s: float = 0.0
    hurried: bool = False
    nudged: bool = False
    detected_s: float = 0.0
    unheard: set[int] = field(default_factory=set)

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.returncode is None]

    @property
    def step(self) -> int:
        """The furthest step a rank has told of."""
        return max(worker.progress().step for worker in self.workers)

    @property
    def only_stops(self) -> bool:
        """True where a signal that asks for a stop has ended all ranks that failed before the others."""
        return bool(self.records) and all(record.secondary or record.is_stop for record in self.records)

    @property
    def is_asked_to_end(self) -> bool:
        return self.signalled is not None or self.nudged

    def ask_to_end(self, number: int, within_s: float) -> None:
        """Files that signal `number` asks the ranks to end."""
        self.signalled, self.signalled_s = number, time.monotonic()
        if self.only_stops:  # the same request came to them first
            self.records, self.deadline_s = [], None
        self.end_within(within_s)

    def note(self, record: ErrorRecord, within_s: float) -> None:
        """Files a failure, after which the others have `within_s` to end."""
        if not self.records:
            last_s = max(worker.progress().at_s for worker in self.workers)
            self.detected_s = time.monotonic() - last_s if last_s else 0.0
        self.records.append(record)
        self.end_within(within_s)

    def note_clean_end(self, rank: int) -> None:
        """Files that `rank` ended with exit code 0: early, unless it was the last or there was an error.

        Ends are noticed in no order: those who failed because this rank had left may be seen before it.
        """
        if (self.running or self.records) and all(record.secondary for record in self.records):
            self.ended_early.append(rank)

    def end_within(self, seconds: float) -> None:
        """Kills whoever still runs after `seconds`, or earlier if that was decided before."""
        at = time.monotonic() + seconds
        self.deadline_s = at if self.deadline_s is None else min(self.deadline_s, at)
