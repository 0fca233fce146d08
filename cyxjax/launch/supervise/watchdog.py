"""The watchdog: reads the heartbeats; when the group makes no progress, collects every rank's stacks."""

import os
import socket
import time
from collections import Counter
from collections.abc import Sequence

from cyxjax.errors import EXIT_HANG, EXIT_USER_ERROR
from cyxjax.launch import output
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.heartbeat import WAITING, Limits, Progress
from cyxjax.launch.output import ranks_text
from cyxjax.launch.supervise import dump, hang
from cyxjax.launch.supervise.hang import Pauses, Stopwatch, Verdict
from cyxjax.launch.supervise.worker import Worker
from cyxjax.redaction import redact

FIRST_STRAGGLER_S, STRAGGLER_EVERY_S = 5.0, 30.0  # after the first step, and from then on


class Watch:
    """Looks at the ranks of one start on every tick. With a limit of 0 it only names stragglers.

    all_here: there are no ranks on other hosts.
    """

    def __init__(self, limits: Limits, all_here: bool) -> None:
        self.limits, self._all_here = limits, all_here
        self._stopwatch = Stopwatch()
        self._pauses = Pauses()
        self._before: dict[int, Progress] = {}
        self._next_line_s = 0.0

    def look(self, workers: Sequence[Worker]) -> ErrorRecord | None:
        """The record of a hang, with the stacks of all ranks; None while all may be well."""
        pulses = {worker.rank: worker.progress() for worker in workers if worker.returncode is None}
        if not pulses:
            return None
        self._stopwatch.see(max(pulses.values(), key=lambda progress: progress.step))
        stopped, now_s = self._note_pauses(workers), time.monotonic()
        if any(map(self._pauses.touches, pulses.values())):
            self._before = {}  # a rank that was suspended is not slow
        else:
            self._name_straggler(pulses)
        if self.limits.progress_s == 0:
            return None
        excused = {rank: self._pauses.excuse(progress) for rank, progress in pulses.items()}
        step_s = self._stopwatch.median_s
        verdict = hang.judge(excused, now_s, self.limits, step_s, stopped, all_here=self._all_here)
        return None if verdict is None else self._record(verdict, workers, pulses, stopped)

    def _note_pauses(self, workers: Sequence[Worker]) -> frozenset[int]:
        """The suspended ranks. They may stay so for the limit if one was set, else for SUSPENDED_S."""
        stopped = frozenset(worker.rank for worker in workers if worker.is_stopped())
        waits = bool(stopped) and self.limits.progress_s is None
        if self._pauses.see(time.monotonic(), waits):
            pids = " ".join(str(worker.pid) for worker in workers if worker.rank in stopped)
            output.say(
                f"{ranks_text(sorted(stopped))}: suspended (SIGSTOP); waiting up to {hang.SUSPENDED_S:g} s. "
                f"HINT: `kill -CONT {pids}` resumes; --hang-timeout sets the limit."
            )
        return stopped

    def _record(
        self,
        verdict: Verdict,
        workers: Sequence[Worker],
        pulses: dict[int, Progress],
        stopped: frozenset[int],
    ) -> ErrorRecord:
        running = [
            dump.RunningRank(w.pid, os.getpid(), w.rank, "", w.files.stacks, w.files.beat)
            for w in workers
            if w.returncode is None
        ]
        dumps = {one.rank: text for one, text in dump.collect(running).items()}
        frames = {rank: dump.main_thread(text) for rank, text in dumps.items()}
        blamed = verdict.rank if verdict.early_end or stopped else _refine(verdict.rank, pulses, frames)
        waits_for = {rank: dump.helpers(text) for rank, text in dumps.items()}
        lines = [
            _where(rank, progress, frames.get(rank, []), waits_for.get(rank, []), rank in stopped)
            for rank, progress in pulses.items()
        ]
        progress, kind = pulses[blamed], "EarlyEnd" if verdict.early_end else "Hang"
        apart = "" if verdict.early_end or stopped else _in_different_calls(frames)
        holds_up = "" if verdict.early_end else f"; {apart or f'rank {blamed} holds up the others'}"
        return ErrorRecord(
            blamed,
            kind,
            verdict.reason + holds_up + "".join(f"\n  {line}" for line in lines),
            exit_code=EXIT_USER_ERROR if verdict.early_end else EXIT_HANG,
            host=socket.gethostname(),
            pid=next(worker.pid for worker in workers if worker.rank == blamed),
            step=progress.step,
            phase=progress.phase,
            source=dump.where(waits_for.get(blamed) or frames.get(blamed, [])),
            at_s=time.time(),
            at_monotonic_s=time.monotonic(),
            stacks={str(rank): redact(text) for rank, text in dumps.items() if text},
        )

    def _name_straggler(self, pulses: dict[int, Progress]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_line_s or any(progress.step < 1 for progress in pulses.values()):
            return
        self._next_line_s = now_s + (STRAGGLER_EVERY_S if self._before else FIRST_STRAGGLER_S)
        if line := hang.stragglers(self._before, pulses):
            output.say(line)
        self._before = pulses


def _refine(rank: int, pulses: dict[int, Progress], frames: dict[int, list[dump.Frame]]) -> int:
    """If all ranks seem to wait, the one at a different place than the others is the one they wait for."""
    known = {r: stack for r, stack in frames.items() if stack}
    if pulses[rank].phase not in WAITING or len(known) < 2:
        return rank
    outside = [r for r, stack in known.items() if not dump.is_inside_jax(stack)]
    if len(outside) == 1:
        return outside[0]
    places = Counter(dump.where(stack) for stack in known.values())
    alone = [r for r, stack in known.items() if places[dump.where(stack)] == 1]
    return alone[0] if len(alone) == 1 and len(places) == 2 else rank


def _in_different_calls(frames: dict[int, list[dump.Frame]]) -> str:
    """The message for ranks that wait for each other in calls from different lines; "" for no such ranks."""
    lines = {dump.users(stack) for stack in frames.values()}
    if len(lines) == 1 or None in lines or not all(map(dump.waits_for_others, frames.values())):
        return ""
    return (
        "the ranks wait for each other in different calls. HINT: make the same calls on every rank, in "
        "the same order: look for `if rank == ...`, or a loop that one rank leaves"
    )


def _where(
    rank: int, progress: Progress, frames: list[dump.Frame], waits_for: list[dump.Frame], stopped: bool
) -> str:
    """'rank 1: step 412, data, at loader.py:123 prefetch, while a thread is at slow.py:9 __getitem__'."""
    at, user = f", at {dump.where(frames)}" if frames else "", dump.users(frames)
    at += f", from {user}" if user and str(user) != dump.where(frames) else ""
    if waits_for:
        at += f", while a thread is at {' and '.join(map(str, waits_for[:3]))}"
    return f"rank {rank}: step {progress.step}, {progress.phase}{', suspended' if stopped else ''}{at}"
