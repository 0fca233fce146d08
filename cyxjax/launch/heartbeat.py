"""Reports how far a rank is through a small shared file, readable from outside while the rank is stuck.

The worker writes (step, phase, time) at every change of phase; the supervisor reads the same file.
A report costs about two microseconds, needs no thread in the worker and no GIL to be read.
"""

import mmap
import os
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from cyxjax.errors import ConfigError

PHASES = ("init", "compile", "data", "step", "collective", "eval", "checkpoint", "idle", "done")
WAITING = ("step", "collective", "done")  # phases in which a rank may be held up by another
_LAYOUT = struct.Struct("<QQ16sdddQ")  # count, step + 1, phase, time, busy_s, waiting_s, count
VARIABLE = "CYXJAX_BEAT_FILE"


class Progress(NamedTuple):  # created twice per step
    """What a rank reported last. `at_s` is on the host's monotonic clock, 0.0 before the first report.

    busy_s, waiting_s: seconds spent so far in phases of its own, and in phases shared with the others.
    """

    step: int = -1
    phase: str = ""
    at_s: float = 0.0
    busy_s: float = 0.0
    waiting_s: float = 0.0


class Reporter:
    """Keeps what this process is doing, and shares it through the file at `path` if one is named.

    last: the last report. spent: seconds in each phase, without the current one; part: how far that one is.
    """

    def __init__(self, path: str = "") -> None:
        self.path, self._count = path, 0
        self.last, self.part = Progress(), ""
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._map: mmap.mmap | None = None
        if not path:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            # In a sparse file, without room, a report is a SIGBUS.
            os.pwrite(descriptor, bytes(_LAYOUT.size), 0)
            self._map = mmap.mmap(descriptor, _LAYOUT.size)
        except OSError as error:
            print(f"cyxjax: no progress is reported, so a hang is not noticed: {error}", file=sys.stderr)
        os.close(descriptor)

    def report(self, step: int, phase: str) -> None:
        """Notes that this process is now in `phase` of `step`, and how long it was in the phase before."""
        now, last = time.monotonic(), self.last
        spent = now - last.at_s if last.at_s else 0.0
        waited = last.phase in WAITING
        busy_s, waiting_s = last.busy_s + (not waited) * spent, last.waiting_s + waited * spent
        self.spent[last.phase] += spent
        self.part = ""
        self.last, self._count = Progress(step, phase, now, busy_s, waiting_s), self._count + 1
        if self._map is not None:
            self._map[:] = _LAYOUT.pack(
                self._count, step + 1, phase.encode(), now, busy_s, waiting_s, self._count
            )


def read_from(descriptor: int) -> Progress:
    """The last report in an open file; an empty Progress where the worker has made none."""
    for _ in range(10):  # equal counts at both ends: not caught in the middle of a write
        data = os.pread(descriptor, _LAYOUT.size, 0)
        if len(data) < _LAYOUT.size:
            return Progress()
        first, step, phase, at_s, busy_s, waiting_s, last = _LAYOUT.unpack(data)
        if first == last:
            name = phase.rstrip(b"\0").decode()
            return Progress(step - 1, name, at_s, busy_s, waiting_s)
    return Progress()


def read(path: str) -> Progress:
    """The last report in the file at `path`, if there is one that can be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_from(file.fileno())
    except OSError:
        return Progress()


_reporter = Reporter()


def start(env: Mapping[str, str]) -> None:
    """Opens the file that the launcher named, once; without one, reports are written nowhere."""
    global _reporter
    if VARIABLE in env and not _reporter.path:
        _reporter = Reporter(env[VARIABLE])
        _reporter.report(-1, "init")


def report_progress(step: int, phase: str) -> None:
    """Reports to the supervisor, if there is one, that this rank is in `phase` (one of PHASES) of `step`."""
    _reporter.report(step, phase)


@contextmanager
def together(step: int | None = None) -> Iterator[None]:
    """Tells the supervisor that this rank waits for the others in the block; restores its phase after it.

    step: for a program that does not count its steps. Nothing is reported before the first step.
    """
    before = _reporter.last
    step = before.step if step is None else step
    if step < 0:
        yield
        return
    report_progress(step, "collective")
    try:
        yield
    finally:
        report_progress(step, before.phase)


def spent() -> dict[str, float]:
    """Seconds this process spent in each phase so far, the current one included."""
    now = _reporter.last
    running_s = time.monotonic() - now.at_s if now.at_s else 0.0
    return _reporter.spent | {now.phase: _reporter.spent[now.phase] + running_s}


def progress() -> Progress:
    """What this process reported last."""
    return _reporter.last


def part(number: int, total: int | None = None) -> None:
    """Notes how far the current phase is, for the live line: `3/5`. Dropped with the next report."""
    _reporter.part = f"{number}/{total}" if total else f"{number}"


def part_text() -> str:
    """What `part` noted about the current phase; "" if nothing."""
    return _reporter.part


# Seconds a rank may stay in one phase without a report, unless set: generous, since a false alarm costs
# a run. A program that never reports stays in `idle`, which has no limit.
DEFAULTS = {"init": 600.0, "compile": 1800.0, "eval": 1800.0, "checkpoint": 1800.0}


@dataclass(frozen=True)
class Limits:
    """Seconds without progress before a rank counts as stuck.

    progress_s: for the phases data, step and collective; None scales it from the median step, max(2 min,
    20 x median), once 20 steps are known, before only for collective; 0 turns the watchdog off. by_phase:
    limits of single phases.
    """

    progress_s: float | None = None
    by_phase: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULTS))

    @classmethod
    def parse(cls, text: str) -> "Limits":
        """From 'auto', '0', '60' or '60,compile=900'. Raises: ConfigError."""
        progress: float | None = None
        by_phase = dict(DEFAULTS)
        for part in filter(None, text.split(",")):
            name, equals, value = part.rpartition("=")
            if not equals and value == "auto":
                continue
            is_number = value.isascii() and value.replace(".", "", 1).isdecimal()
            if not is_number or (equals and name not in PHASES):
                raise ConfigError(
                    f"--hang-timeout={text!r}: {part!r} is not understood. "
                    f"HINT: give seconds, 0 for off, or PHASE=seconds with one of {', '.join(PHASES)}."
                )
            if equals:
                by_phase[name] = float(value)
            else:
                progress = float(value)
        return cls(progress, by_phase)

    def of(self, progress: Progress, step_s: float | None) -> float | None:
        """The limit for a rank at `progress`, with the median step `step_s`; None for no limit."""
        if progress.phase in self.by_phase:
            return self.by_phase[progress.phase] or None
        if self.progress_s is not None and progress.phase != "idle":
            compiling_s = self.by_phase["compile"] if progress.step < 1 else self.progress_s  # the first step
            has_none = not self.progress_s or (progress.phase == "step" and not compiling_s)
            return None if has_none else max(self.progress_s, compiling_s)
        if step_s is None and progress.phase == "collective":
            step_s = 0.0  # nothing is computed meanwhile: no step needs to be known
        if step_s is None or progress.phase not in ("data", "step", "collective"):
            return None
        return max(120.0, 20 * step_s)  # a file server may stall for a minute
