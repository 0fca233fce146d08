"""Where a run's time went, over all its restarts, and how much of the devices it used.

Time is measured by the phases that a rank reports to its supervisor (`heartbeat.report_progress`).
`goodput.json` in the run folder carries the sums and the step reached from one process to the next, so
that the cost of a crash is known.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cyxjax.files import read_plain, write_whole
from cyxjax.launch import heartbeat
from cyxjax.launch.program import command_line
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink, once, warn_if_unwritten
from cyxjax.train.hooks.hook import Hook, Position, RunState, StepInfo

CAUSES = ("start", "compile", "input", "evaluation", "checkpoint", "restore", "restart", "redone")
"""Causes of time not spent on steps that count. restart: from the last sign of life before an interruption to
the first step afterwards; redone: steps that had already been done when the run was interrupted."""
_OF_PHASE = {
    "compile": "compile",
    "data": "input",
    "eval": "evaluation",
    "collective": "evaluation",  # exchanges between ranks outside of steps: most belong to evaluations
    "checkpoint": "checkpoint",
    "step": "step",
}
_MOST = 1e15  # larger numbers were not written by a run
_EVERY_S = 5.0  # between signs of life: so much of a crash's cost can go unrecorded


class GoodputHook(Hook):
    """Adds up seconds by cause, writes them to the run folder, and prints a line at the end.

    Comes after the hook that saves, so that the last save is part of the sums.
    """

    def __init__(
        self,
        path: Path,
        history: DistributedTrainingHistory,
        sink: Sink,
        say: Callable[[str], None],
        flops_per_step: Callable[[], float] = lambda: 0.0,
        use: Callable[[float], dict[str, Any]] = lambda flops_per_second: {},
        *,
        starts_over: bool = False,
    ):
        """flops_per_step: of this process's program, over all replicas. use: FLOP per second ->
        fields of the history about device use. starts_over: whether the run that the folder holds is over,
        also if it was interrupted.
        """
        self._path, self._history, self._sink, self._say = path, history, sink, say
        self._warn = once(say)
        self._flops_per_step, self._use, self._starts_over = cache(flops_per_step), use, starts_over
        self._before: dict[str, float] = {}  # seconds of earlier processes, and what their end cost
        self._base: dict[str, float] = {}  # phases up to here that are accounted for in _before
        self._steps, self._step, self._written_s = 0, 0, 0.0
        self._previous_s: dict[str, float] = {}  # of a run that had ended where this process starts
        self._flops, self._peak_bytes, self._trained = 0.0, 0, False

    def on_start(self, moment: RunState) -> None:
        if self._before:  # a rollback
            self._before, self._base = self._seconds(), heartbeat.spent()
            self._redo(self._step, moment.position.step)
            self._step = moment.position.step
            return
        self._base, self._written_s, self._step = heartbeat.spent(), time.monotonic(), moment.position.step
        previous = read(self._path)
        ended = bool(previous) and previous["ended"] and moment.position == Position()
        if ended or self._starts_over:
            previous = {}  # another run in the same folder
        self._before, self._steps = dict(previous.get("seconds", {})), int(previous.get("steps", 0))
        self._flops, self._peak_bytes = previous.get("flops", 0.0), previous.get("peak_memory_bytes", 0)
        if previous and "flops" not in previous:  # of an earlier version
            self._flops = self._steps * self._flops_per_step()
        if previous and previous["ended"] and previous["step"] == moment.position.step:
            self._previous_s = dict(self._before)
        # A process that has trained before spent most of its time on other runs, or idle.
        spent = {} if "step" in self._base else self._base
        restore_s = spent.get("checkpoint", 0.0) if previous else 0.0
        self._add("restore", restore_s)
        if not previous or previous["ended"]:  # a requested pause is not a loss
            self._add("start", spent.get("init", 0.0) + spent.get("idle", 0.0))
        else:
            self._add("restart", max(0.0, time.time() - previous["at_unix_s"] - restore_s))
        self._redo(previous.get("step", 0), moment.position.step)
        self._write()  # what this start has cost is known also if the process ends soon

    def on_step(self, info: StepInfo) -> None:
        self._step, self._steps = info.position.step, self._steps + 1
        self._flops, self._trained = self._flops + self._flops_per_step(), True
        if time.monotonic() - self._written_s > _EVERY_S:
            self._write()

    def on_end(self, moment: RunState, finished: bool) -> None:
        seconds = self._seconds()
        used = self._use(self._flops / max(seconds["step"] + seconds["input"], 1e-9))
        self._peak_bytes = max(self._peak_bytes, used.get("peak_memory_bytes", 0))
        used |= {"peak_memory_bytes": self._peak_bytes}
        if self._previous_s and not self._trained:  # the run was over: starting it again is not a part of it
            self._before, self._base = self._previous_s, heartbeat.spent()
        seconds = self._write(ended=True)
        self._history.goodput = share(seconds)
        for name, value in used.items():
            setattr(self._history, name, value)
        if not self._trained:  # nothing new to record
            return
        named = {f"seconds_{name}": value for name, value in seconds.items()}
        known = {name: value for name, value in used.items() if value}  # 0 and "": not known
        entry = {"kind": "goodput", "step": self._step, "goodput": share(seconds), **named, **known}
        self._sink.log({**entry, "command": command_line()})
        self._say(line(seconds))

    def _redo(self, done: int, step: int) -> None:
        """Counts the time of the steps after `step`, up to `done`, as lost: the run repeats them."""
        again = max(0, done - step)
        lost = min(again / max(1, self._steps), 1.0)
        lost_s = lost * self._before.get("step", 0.0)
        self._add("redone", lost_s)
        self._add("step", -lost_s)
        self._flops *= 1 - lost
        self._steps = max(0, self._steps - again)

    def _add(self, cause: str, seconds: float) -> None:
        self._before[cause] = self._before.get(cause, 0.0) + seconds

    def _seconds(self) -> dict[str, float]:
        """Seconds by cause up to now, over all processes of the run."""
        sums = {"step": 0.0, **dict.fromkeys(CAUSES, 0.0)} | self._before
        for phase, spent_s in heartbeat.spent().items():
            if phase in _OF_PHASE:
                sums[_OF_PHASE[phase]] += spent_s - self._base.get(phase, 0.0)
        return sums

    def _write(self, ended: bool = False) -> dict[str, float]:
        seconds = self._seconds()
        self._written_s = time.monotonic()
        values = {
            "seconds": seconds,
            "steps": self._steps,
            "step": self._step,
            "flops": self._flops,
            "peak_memory_bytes": self._peak_bytes,
            "at_unix_s": time.time(),
            "ended": ended,
        }
        with warn_if_unwritten(self._path, self._warn):
            # Not synced: beside a save in the background, a step would wait for its bytes.
            write_whole(self._path, json.dumps(values, indent=1) + "\n", synced=False)
        return seconds


def share(seconds: Mapping[str, float]) -> float:
    """The fraction of the time, 0 to 1, that was spent on steps that count."""
    return seconds["step"] / max(sum(seconds.values()), 1e-9)


def line(seconds: Mapping[str, float]) -> str:
    """`Goodput: 93 % of 120.0 s were steps that count; the rest: compile 4.1 s, evaluation 2.0 s.`"""
    rest = sorted(((s, name) for name, s in seconds.items() if name != "step" and s >= 0.05), reverse=True)
    text = ", ".join(f"{'redone steps' if name == 'redone' else name} {s:.1f} s" for s, name in rest)
    whole = f"Goodput: {share(seconds):.0%} of {sum(seconds.values()):.1f} s were steps that count"
    return f"{whole}; the rest: {text}." if text else f"{whole}."


def read(path: Path) -> dict[str, Any]:
    """Returns what an earlier process of the run wrote; {} if the file is missing or incomplete."""
    try:
        raw = json.loads(read_plain(path))
        numbers = [*raw["seconds"].values(), raw["steps"], raw["step"], raw["at_unix_s"]]
        numbers.append(raw.get("peak_memory_bytes", 0))
        known = all(0 <= n < _MOST for n in numbers) and 0 <= raw.get("flops", 0.0) < float("inf")
        return raw if known and "ended" in raw else {}  # NaN is neither
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
