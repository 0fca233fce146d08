"""One host's ranks through one start: spawn them, watch them, and end them all when one has failed."""

import itertools
import math
import os
import queue
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType, TracebackType

from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.launch import output
from cyxjax.launch.backend import pages
from cyxjax.launch.group.protocol import Message
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.options import Options
from cyxjax.launch.save_request import ONE_REQUEST_S, STOPS
from cyxjax.launch.supervise.processes import Reaper
from cyxjax.launch.supervise.scratch import Scratch
from cyxjax.launch.supervise.watchdog import Watch
from cyxjax.launch.supervise.worker import Files, Start, Worker, environment

TICK_S = 0.25  # how often heartbeats are read; ends and signals are noticed immediately
SETTLE_S = 0.3  # after the first error: time for the others to end on their own and report why
WAIT_FOR_CAUSE_S = 1.5  # after a consequence: time for its cause to show
CAUGHT = (*STOPS, signal.SIGUSR1, signal.SIGTSTP)


LOST: Message = {"polite": False}  # stands for the end of the connection to the first host
Event = Worker | int | Message  # a rank has ended, a signal has come, the first host has sent something


class Stopped(Exception):
    """The signal that is its argument asked this host to leave between two starts."""


class WorkerGroup:
    """The ranks of this host, start after start; a context that passes on signals and that no rank outlives.

    After a signal that asks for a stop, this process ignores further ones: it is about to end.
    put: adds an event; other threads may call it at any time. scratch: the launcher's own folder.
    """

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        own = dict(env) if options.pages == pages.AUTO else {**env, pages.VARIABLE: options.pages}
        self.options, self._env = options, own | pages.variables(own, options.place.nproc)
        _make_folder(options.log_dir)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reaper = Reaper()
        self.scratch = Scratch()
        self.put = self._events.put
        self._kept: list[Message] = []  # received during a start, for what follows it
        self._previous: dict[int, object] = {}
        self._processes = itertools.count()  # started so far
        self._is_asked_to_end = False

    def __enter__(self) -> "WorkerGroup":
        # One that was ignored when we began stays ignored (nohup, `&`).
        ours = [n for n in CAUGHT if n == signal.SIGUSR1 or signal.getsignal(n) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in ours}
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:  # for ranks; a scheduler may send it to all
            self._previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the ends of ranks would be lost
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            handler = signal.SIG_IGN if self._is_asked_to_end and number in STOPS else previous
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave
        self._reaper.close()
        self.scratch.clear()

    def run(self, place: LocalRanks, number: int) -> Start:
        """Runs start `number` at `place`, from its first process to the end of its last."""
        start = Start(number, [])
        try:
            for local_rank in range(place.nproc):
                start.workers.append(self._spawn(place, local_rank, number))
            self._attend(start, Watch(self.options.limits, place.is_alone))
        finally:
            for worker in start.running:  # only after an error of our own
                worker.signal_group(signal.SIGKILL)
            start.step = max((worker.progress().step for worker in start.workers), default=-1)
            for worker in start.workers:
                worker.close()
        return start

    def between_starts(self, seconds: float) -> Message:
        """What the first host sends within `seconds`; {} for nothing. Raises: Stopped."""
        event = self._kept.pop(0) if self._kept else self._next(seconds)
        if isinstance(event, int):
            if event == signal.SIGTSTP:
                signal.raise_signal(signal.SIGSTOP)
            if event in STOPS:
                raise Stopped(event)
        return event if isinstance(event, dict) else {}

    def sleep(self, seconds: float) -> None:
        """Waits between starts. Raises: Stopped."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.between_starts(left)

    def _spawn(self, place: LocalRanks, local_rank: int, number: int) -> Worker:
        self.scratch.ensure()
        rank = place.base_rank + local_rank
        files = Files.within(self.scratch.path, rank, next(self._processes))
        prefix = f"[rank {rank}] " if place.world_size > 1 else ""
        variables = environment(place, local_rank, number, files, self._env)
        worker = Worker(
            rank,
            self.options.command,
            variables | output.variables(prefix),
            files,
            prefix=prefix,
            shown=local_rank in self.options.shown,
            log_dir=self.options.log_dir,
            start=number,
        )
        self._reaper.watch(worker.pid)
        worker.watch(self._events.put)
        return worker

    def _next(self, seconds: float) -> Event | None:
        """The next event; None if none comes within `seconds`."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _attend(self, start: Start, watch: Watch) -> None:
        """Returns when all ranks of `start` have ended, by themselves or by us."""
        ended = 0
        while ended < len(start.workers):
            event = self._next(TICK_S)
            if isinstance(event, Worker):
                ended += 1
                self._reaper.release(event.pid)
                self._note_end(start, event)
            elif isinstance(event, int):
                self._obey(start, event)
            elif event is not None:
                self._follow(start, event)
            with suppress(OSError):  # no room: running ranks do not need the folder
                self.scratch.ensure()
            self._kill_if_due(start)
            # Not after each event: a look is at every rank, and thousands may end at the same moment.
            if event is None and start.deadline_s == math.inf and (record := watch.look(start.workers)):
                start.note(record, within_s=0.0)

    def _note_end(self, start: Start, worker: Worker) -> None:
        """Records how `worker` ended, except for ranks that we killed.

        A signal that asks for a stop and ended one rank is handled like a signal to this process. Once the
        ranks are asked to end only an exception counts, such as that a checkpoint could not be saved.
        """
        if worker.rank in start.killed:
            return
        if worker.returncode == EXIT_OK:
            start.note_clean_end(worker.rank)
        elif start.is_asked_to_end:
            record = worker.record(start.number)
            if record is not None and record.traceback and not record.secondary:
                start.note(record, within_s=self.options.grace_s)
        elif (number := worker.stopped_by()) is not None:
            how = "was interrupted" if number == signal.SIGINT else "was asked to stop"
            output.say(f"rank {worker.rank} {how}, and this host stops with it")
            self._is_asked_to_end = True
            self._obey(start, number)
        elif (record := worker.record(start.number)) is not None:
            start.note(record, within_s=WAIT_FOR_CAUSE_S if record.secondary else SETTLE_S)

    def _kill_if_due(self, start: Start) -> None:
        if time.monotonic() < start.deadline_s:
            return
        if self._is_saving(start):
            return
        for worker in start.running:
            if worker.rank not in start.killed:
                start.killed.append(worker.rank)
                worker.signal_group(signal.SIGKILL)

    def _is_saving(self, start: Start) -> bool:
        """True while a rank that was asked to end writes a checkpoint, within the grace of a SIGTERM.

        It matters where a failure was noted just before the signal: a scheduler signals all processes, and a
        data worker ends first.
        """
        within = time.monotonic() < start.asked_s + self.options.grace_s
        return within and not start.hurried and any(w.progress().phase == "checkpoint" for w in start.running)

    # -- signals --------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_to_end |= number in STOPS
        self._events.put(number)

    def _obey(self, start: Start, number: int) -> None:
        """SIGUSR1 goes to the ranks (save now), Ctrl-Z suspends; others end all."""
        if number == signal.SIGTSTP:
            _suspend(start)
            return
        if start.signalled is not None and number != signal.SIGUSR1:
            if time.monotonic() > start.asked_s + ONE_REQUEST_S:
                start.hurried = "at the second signal"
                start.end_within(0.0)
            return
        if number == signal.SIGUSR1 or not start.is_asked_to_end:
            for worker in start.running:  # SIGHUP is passed on as SIGTERM: ranks have no terminal
                worker.signal(signal.SIGTERM if number == signal.SIGHUP else number)
        if number != signal.SIGUSR1:
            output.say(
                f"{signal.Signals(number).name}: the ranks have {self.options.grace_s:g} s to stop; "
                f"another signal, at least {ONE_REQUEST_S:g} s later, kills them"
            )
            start.ask_to_end(number, within_s=self.options.grace_s)

    def _follow(self, start: Start, message: Message) -> None:
        """Handles the first host's message in a start: ends the ranks if it orders so, or keeps it for later.

        Asked politely they get SIGTERM, and a trainer then saves; a second order may be less polite.
        """
        if "end" not in message:
            self._kept.append(message)
        ends = message.get("end") == start.number or "over" in message or message is LOST
        is_polite = message.get("polite", True)
        # The first host says that the job is over, and leaves: its loss then is no order to hurry.
        is_repeated = start.is_asked_to_end and (is_polite or message is LOST)
        if not ends or start.signalled is not None or is_repeated:
            return
        start.asked_s = time.monotonic()
        if not is_polite:
            start.hurried = "when the group ended"
            start.end_within(0.0)
            return
        for worker in start.running:
            worker.signal(signal.SIGTERM)
        start.end_within(self.options.grace_s)


def _suspend(start: Start) -> None:
    """Ctrl-Z reaches only us, since ranks have their own sessions: they are stopped and resumed with us."""
    for worker in start.running:
        worker.signal_group(signal.SIGSTOP)
    output.flush(0.2)
    signal.raise_signal(signal.SIGSTOP)
    for worker in start.running:
        worker.signal_group(signal.SIGCONT)


def _make_folder(path: str | None) -> None:
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--log-dir={path} cannot be created: {error.strerror}. HINT: name a folder you can write to."
        ) from error
