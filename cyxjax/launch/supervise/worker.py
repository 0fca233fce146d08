"""One rank as the launcher sees it (a process group, two streams, three small files), and one start of all
ranks of this host with how it ended.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from cyxjax.errors import EXIT_INTERRUPT, EXIT_PREEMPTED
from cyxjax.launch import heartbeat, output
from cyxjax.launch.environment import set_threads
from cyxjax.launch.failure import hooks
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.save_request import STOPS
from cyxjax.launch.supervise import processes
from cyxjax.redaction import redact

LOADING_S = 5.0  # within this time of its start a rank without a report is taken to load its libraries
LAUNCHER = "CYXJAX_LAUNCHER"  # the process that started a rank: pid and start time


@dataclass(frozen=True)
class Files:
    """The files of one rank in one start, which the launcher reads."""

    beat: str
    error: str
    stacks: str

    @classmethod
    def within(cls, folder: str, rank: int, number: int) -> "Files":
        """number: of the process, counted by its launcher: a new first host counts starts from 0 again."""
        stem = os.path.join(folder, f"rank_{rank}_{number}")
        return cls(f"{stem}.beat", f"{stem}.error.json", f"{stem}.stacks")


def environment(
    place: LocalRanks,
    local_rank: int,
    start: int,
    files: Files,
    outer: Mapping[str, str],
) -> dict[str, str]:
    """The environment of a rank: torch's variables and ours."""
    env = {
        **outer,
        **place.variables(local_rank, start),
        LAUNCHER: processes.identity(os.getpid()),
        heartbeat.VARIABLE: files.beat,
        records.VARIABLE: files.error,
        hooks.STACKS: files.stacks,
        "PYTHONUNBUFFERED": "1",
    }
    set_threads(env, place.nproc)  # libraries read it when they load; also for programs that do not use us
    return env


class Worker:
    """A started rank. `returncode` is None while it runs, then as subprocess's: negative for a signal."""

    def __init__(
        self,
        rank: int,
        command: list[str],
        env: dict[str, str],
        files: Files,
        *,
        prefix: str,
        shown: bool,
        log_dir: str | None,
        start: int,
    ) -> None:
        self.rank, self.files = rank, files
        self.returncode: int | None = None
        self._reaping = threading.Lock()  # while it is held, the pid is the rank's or nobody's
        self._log: BinaryIO | None = None
        try:
            self._log = output.open_log(log_dir, rank, start) if log_dir else None
        except OSError as error:  # a full disk must not end the job
            output.say(f"rank {rank} has no log file: {error}")
        # The open file outlives its name. An error here must come before the start of a process.
        self._beat = os.open(files.beat, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._process = processes.start(command, env)
        self.pid = self._process.pid
        self._loads_until_s = time.monotonic() + LOADING_S
        out, err = (output.screen(stream) if shown else None for stream in (sys.stdout, sys.stderr))
        self._out = output.Pump(self._process.stdout, prefix, out, self._log)
        self._err = output.Pump(self._process.stderr, prefix, err, self._log)

    def watch(self, on_exit: Callable[["Worker"], None]) -> None:
        """Calls `on_exit(self)`, from a thread, when the process has ended and its group is killed."""
        threading.Thread(target=self._wait, args=(on_exit,), name="cyxjax-wait", daemon=True).start()

    def signal(self, number: int) -> None:
        """Sends `number` to the rank's process; nothing if it has ended.

        SIGINT is sent as SIGTERM while the rank still loads: Python would print where it was interrupted.
        """
        if number == signal.SIGINT and not self.progress().at_s and time.monotonic() < self._loads_until_s:
            number = signal.SIGTERM
        # Popen.send_signal would reap a rank that has just ended, and `_wait` would miss its end.
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends `number` to the rank and what it has started; does nothing once its end was noticed."""
        with self._reaping, suppress(ProcessLookupError):
            if self.returncode is None:
                os.killpg(self.pid, number)

    def progress(self) -> Progress:
        """The rank's last report. Not once this worker is closed."""
        found = heartbeat.read_from(self._beat)
        # If our file was removed before the rank opened it, the rank has created another one.
        return found if found.at_s else heartbeat.read(self.files.beat)

    def is_stopped(self) -> bool:
        """True while the process is suspended (SIGSTOP, or a debugger holds it)."""
        found = processes.stat(self.pid)
        return found is not None and found.is_stopped

    def close(self) -> None:
        """Collects the last output and closes the files."""
        os.close(self._beat)
        self._out.finish()
        self._err.finish()
        with suppress(OSError):  # what a full disk has kept from it
            if self._log is not None:
                self._log.close()

    def stopped_by(self) -> int | None:
        """The signal that ended this rank, if it asks for a stop and the other ranks do not know of it.

        A rank in training informs them, and all end after the same step.
        """
        assert self.returncode is not None
        if -self.returncode in STOPS:
            return -self.returncode
        is_alone = self.progress().step < 0 or os.path.exists(self.files.error)
        return signal.SIGINT if self.returncode == EXIT_INTERRUPT and is_alone else None

    def record(self, start: int) -> ErrorRecord | None:
        """What ended this rank abnormally: its own record, or one made from its exit status.

        None where it has stopped as it was asked to.
        """
        assert self.returncode is not None
        if self.returncode in (EXIT_PREEMPTED, EXIT_INTERRUPT):
            return None
        record = records.load(self.files.error) or records.of_status(
            self.rank, self.pid, self.returncode, self.progress(), start
        )
        self._err.finish()
        record.stderr_tail = redact("\n".join(self._err.tail)).splitlines()  # a private key spans lines
        return record

    def _wait(self, on_exit: Callable[["Worker"], None]) -> None:
        # Seen but not reaped: until the group is killed its number cannot become another's.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.signal_group(signal.SIGKILL)
        with self._reaping:
            self.returncode = self._process.wait()
        on_exit(self)


@dataclass
class Start:
    """One start of the group on this host.

    step: the furthest that a rank has reported, once all have ended. deadline_s: when ranks that still run
    are killed. asked_s: when it was asked to end (-inf: never), by the signal `signalled`, or by the first
    host or its loss. hurried: when ranks that save are killed too, in words.
    """

    number: int
    workers: list[Worker]
    records: list[ErrorRecord] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    ended_early: list[int] = field(default_factory=list)
    step: int = -1
    deadline_s: float = math.inf
    signalled: int | None = None
    asked_s: float = -math.inf
    hurried: str = ""

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.returncode is None]

    @property
    def is_asked_to_end(self) -> bool:
        return self.asked_s > -math.inf

    def ask_to_end(self, number: int, within_s: float) -> None:
        """Records that signal `number` asks the ranks to end."""
        self.signalled, self.asked_s = number, time.monotonic()
        if self.records and all(record.secondary for record in self.records):  # of the same request
            self.records, self.deadline_s = [], math.inf
        self.end_within(within_s)

    def note(self, record: ErrorRecord, within_s: float) -> None:
        """Records a failure, after which the others have `within_s` to end."""
        self.records.append(record)
        self.end_within(within_s)

    def note_clean_end(self, rank: int) -> None:
        """Records that `rank` ended with exit code 0, if others run or have failed, perhaps because of it.

        Ends are noticed in any order: ranks that failed because this one left may be noticed before it.
        """
        if (self.running or self.records) and all(record.secondary for record in self.records):
            self.ended_early.append(rank)

    def end_within(self, seconds: float) -> None:
        """Sets when ranks that still run are killed: after `seconds`, or earlier if so decided before."""
        self.deadline_s = min(self.deadline_s, time.monotonic() + seconds)
