"""Which rank is stuck and which ranks wait for it, from the ranks' heartbeats alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cyxjax.launch.heartbeat import WAITING, Limits, Progress
from cyxjax.launch.output import ranks_text

STEPS_BEFORE_SCALING = 20
ASLEEP_S = 5.0  # a supervisor that looks four times a second and did not for so long was itself suspended
SUSPENDED_S = 300.0  # how long a suspended rank is waited for, unless --hang-timeout says less
EARLY_END_S = 3.0


@dataclass
class Stopwatch:
    """Step times of the group, from the beats as they are seen."""

    times_s: list[float] = field(default_factory=list)
    _furthest: Progress = Progress()

    def see(self, progress: Progress) -> None:
        if progress.step > self._furthest.step >= 0 and progress.at_s > self._furthest.at_s:
            per_step = (progress.at_s - self._furthest.at_s) / (progress.step - self._furthest.step)
            self.times_s = [*self.times_s[-99:], per_step]
        if progress.step > self._furthest.step:
            self._furthest = progress

    @property
    def median_s(self) -> float | None:
        """None before enough steps were seen to judge by."""
        return _median(self.times_s) if len(self.times_s) >= STEPS_BEFORE_SCALING else None


@dataclass
class Pauses:
    """The times when the job, or a rank of it, was suspended and could make no progress."""

    _spans: list[tuple[float, float]] = field(default_factory=list)
    _seen_s: float = 0.0
    _since_s: float | None = None

    def see(self, now_s: float, ranks_stopped: bool) -> bool:
        """Notes the state at `now_s`; True when a suspension of ranks begins."""
        asleep = self._seen_s > 0 and now_s - self._seen_s > ASLEEP_S
        held = ranks_stopped and self._since_s is not None and now_s - self._since_s < SUSPENDED_S
        if asleep or held:
            joins = bool(self._spans) and self._spans[-1][1] == self._seen_s
            begin = self._spans.pop()[0] if joins else self._seen_s
            self._spans.append((begin, now_s))
        begins = ranks_stopped and self._since_s is None and not asleep  # resumed with us, an instant later
        if not ranks_stopped:
            self._since_s = None
        elif begins:
            self._since_s = now_s
        self._seen_s = now_s
        return begins

    def touches(self, progress: Progress) -> bool:
        """True until `progress` is newer than the last pause: the first report after it counts it as work."""
        return bool(self._spans) and progress.at_s <= self._spans[-1][1]

    def excuse(self, progress: Progress) -> Progress:
        """`progress` as late as it would be without the pauses since."""
        paused_s = sum(max(0.0, end - max(begin, progress.at_s)) for begin, end in self._spans)
        return progress._replace(at_s=progress.at_s + paused_s) if progress.at_s else progress


@dataclass(frozen=True)
class Verdict:
    """The rank that holds up a group without progress. `early_end`: that rank has finished and left."""

    rank: int
    reason: str
    early_end: bool = False


def judge(
    pulses: Mapping[int, Progress],
    now_s: float,
    limits: Limits,
    step_s: float | None,
    stopped: frozenset[int],
    *,
    all_here: bool = True,
) -> Verdict | None:
    """The rank that holds the others up; None while all ranks may still be working.

    Ranks that wait for others are blamed only if all ranks of the job wait too long: they may have waited for
    a long save or compilation, which continues or has just ended.
    stopped: ranks whose process is suspended (SIGSTOP), whatever phase they were in.
    all_here: there are no ranks on other hosts, of which nothing is known here.
    """
    reports = {rank: progress for rank, progress in pulses.items() if progress.at_s}
    if ended := _early_end(reports, now_s):
        return ended
    over = {rank for rank, progress in reports.items() if _is_over(progress, now_s, limits, step_s)}
    if not over:
        return None
    own = [rank for rank in over if reports[rank].phase not in WAITING]
    suspects = sorted(stopped & set(reports)) or own
    if not suspects:
        if not all_here or any(rank not in over and reports[rank].phase != "done" for rank in reports):
            return None
        suspects = list(over)  # the one at the lowest step holds up the rest
    blamed = min(suspects, key=lambda rank: (reports[rank].step, reports[rank].at_s))
    return Verdict(blamed, f"no progress for {now_s - reports[blamed].at_s:.0f} s")


def _is_over(progress: Progress, now_s: float, limits: Limits, step_s: float | None) -> bool:
    limit = limits.of(progress, step_s)
    return limit is not None and progress.phase != "done" and now_s - progress.at_s > limit


def _early_end(reports: Mapping[int, Progress], now_s: float) -> Verdict | None:
    """A rank that has finished while others are in a later step will never join their collective."""
    done = [rank for rank, progress in reports.items() if progress.phase == "done"]
    waiting = [
        rank
        for rank, progress in reports.items()
        if progress.phase in ("step", "collective") and progress.step > 0
    ]
    if not done or len(done) + len(waiting) < len(reports) or not waiting:
        return None
    if any(now_s - progress.at_s < EARLY_END_S for progress in reports.values()):
        return None
    first = min(done, key=lambda rank: reports[rank].at_s)
    steps = ", ".join(str(step) for step in sorted({reports[rank].step for rank in waiting}))
    return Verdict(
        first,
        f"rank {first} finished at step {reports[first].step}, but {ranks_text(waiting)} cannot continue "
        f"without it in step {steps}: the ranks ran different numbers of steps. HINT: give all ranks the "
        "same number of batches, and look for calls inside `if rank == ...`",
        early_end=True,
    )


def stragglers(before: Mapping[int, Progress], now: Mapping[int, Progress]) -> str | None:
    """One line naming a rank that takes over twice the others' time outside shared work, else None."""
    per_step: dict[int, float] = {}
    for rank, progress in now.items():
        steps = progress.step - before[rank].step if rank in before else 0
        if steps > 0:
            per_step[rank] = (progress.busy_s - before[rank].busy_s) / steps
    if len(per_step) < 2:
        return None
    slow = max(per_step, key=lambda rank: per_step[rank])
    others = _median([value for rank, value in per_step.items() if rank != slow])
    if per_step[slow] < 0.05 or per_step[slow] < 2 * others:
        return None
    return (
        f"rank {slow} is slow: {per_step[slow] * 1000:.0f} ms per step outside the shared step, the others "
        f"{others * 1000:.0f} ms (last seen in {now[slow].phase}); all ranks wait for it"
    )


def _median(values: list[float]) -> float:
    """The middle value (the upper of two). The standard library's takes 8 ms to import."""
    return sorted(values)[len(values) // 2]
