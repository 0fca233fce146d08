"""Reports how far a rank is through a small shared file, readable from outside while the rank is stuck.

The worker writes (step, phase, time) at every change of phase; the supervisor maps the same file and
reads it. Costs about two microseconds a beat, needs no thread in the worker and no GIL to be read.
"""

import glob
import io
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cyxjax.errors import ConfigError

PHASES = ("init", "compile", "data", "step", "collective", "eval", "checkpoint", "idle", "done")
WAITING = ("step", "collective", "done")  # phases in which a rank may be held up by another
_LAYOUT = struct.Struct("<QQ16sdddBQ")  # count, step + 1, phase, time, busy_s, waiting_s, can_dump, count
VARIABLE = "CYXJAX_BEAT_FILE"
DETECTED = "CYXJAX_DETECTED_S"


class Pulse(NamedTuple):  # made twice a step
    """What a rank reported last. `at_s` is on the host's monotonic clock, 0.0 before the first beat.

    busy_s, waiting_s: seconds spent so far in phases of its own, and in phases shared with the others.
    can_dump: SIGUSR2 makes this process write its stacks (without a handler it would kill it).
    """

    step: int = -1
    phase: str = ""
    at_s: float = 0.0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    can_dump: bool = False


class Writer(Protocol):
    """What a worker needs: `tell` each change, which returns the pulse before; `pulse` reads the last."""

    def tell(self, step: int, phase: str) -> Pulse: ...
    def allow_dumps(self) -> None: ...
    def pulse(self) -> Pulse: ...


class NullBeat:
    """No supervisor reads: remembers the last beat for error records, writes nothing."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def tell(self, step: int, phase: str) -> Pulse:
        last, self._pulse = self._pulse, Pulse(step, phase, time.monotonic())
        return last

    def allow_dumps(self) -> None:
        return

    def pulse(self) -> Pulse:
        return self._pulse


class FileBeat:
    """A beat shared through the file at `path`, which is made if it is not there."""

    def __init__(self, path: str) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.ftruncate(descriptor, _LAYOUT.size)
            self._map = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        self._count = 0
        self._last = Pulse()

    def tell(self, step: int, phase: str) -> Pulse:
        """Says that this rank is now in `phase` of `step`, and charges the time since to the phase before."""
        now, last = time.monotonic(), self._last
        spent = now - last.at_s if last.at_s else 0.0
        waited = last.phase in WAITING
        busy_s, waiting_s = last.busy_s + (not waited) * spent, last.waiting_s + waited * spent
        self._write(Pulse(step, phase, now, busy_s, waiting_s, last.can_dump))
        return last

    def allow_dumps(self) -> None:
        """Says that SIGUSR2 is handled from now on."""
        last = self._last
        self._write(Pulse(last.step, last.phase, last.at_s, last.busy_s, last.waiting_s, True))

    def pulse(self) -> Pulse:
        return self._last

    def _write(self, pulse: Pulse) -> None:
        self._last, self._count = pulse, self._count + 1
        numbers = (pulse.at_s, pulse.busy_s, pulse.waiting_s, pulse.can_dump)
        phase = pulse.phase.encode()[:16]
        self._map[:] = _LAYOUT.pack(self._count, pulse.step + 1, phase, *numbers, self._count)


class Reader:
    """Reads the beats in the file at `path`, also after somebody has removed its name."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def read(self) -> Pulse:
        """The last pulse; an empty Pulse when the worker has not started to beat."""
        try:
            self._file = self._file or open(self._path, "rb", buffering=0)  # noqa: SIM115  # until `close`
        except FileNotFoundError:
            return Pulse()
        for _ in range(10):  # equal counts at both ends: not caught in the middle of a write
            self._file.seek(0)
            data = self._file.read(_LAYOUT.size)
            if len(data) < _LAYOUT.size:
                return Pulse()
            first, step, phase, at_s, busy_s, waiting_s, can_dump, last = _LAYOUT.unpack(data)
            if first == last:
                return Pulse(step - 1, phase.rstrip(b"\0").decode(), at_s, busy_s, waiting_s, bool(can_dump))
        return Pulse()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: str) -> Pulse:
    """The last pulse in `path`, once."""
    reader = Reader(path)
    try:
        return reader.read()
    finally:
        reader.close()


_writer: Writer = NullBeat()
_detected_s = 0.0


def start(env: Mapping[str, str]) -> Writer:
    """Opens the beat file the launcher named, once; without one, beats go nowhere."""
    global _writer, _detected_s
    _detected_s = float(env.get(DETECTED) or 0.0)
    if VARIABLE in env and isinstance(_writer, NullBeat):
        _writer = FileBeat(env[VARIABLE])
        _writer.tell(-1, "init")
    return _writer


def beat(step: int, phase: str) -> None:
    """Reports to the supervisor, if there is one, that this rank is in `phase` (one of PHASES) of `step`."""
    before = _writer.tell(step, phase)
    if before.at_s:
        _spent[before.phase] = _spent.get(before.phase, 0.0) + _writer.pulse().at_s - before.at_s


@contextmanager
def together(step: int | None = None) -> Iterator[None]:
    """Tells the supervisor that this rank waits for the others inside; after it, what it told before.

    step: of a program that counts none itself. Nothing is told before the first step of all.
    """
    before = _writer.pulse()
    step = before.step if step is None else step
    if step < 0:
        yield
        return
    beat(step, "collective")
    try:
        yield
    finally:
        beat(step, before.phase)


_spent: dict[str, float] = {}


def spent() -> dict[str, float]:
    """Seconds this process spent in each phase so far, the one under way included."""
    now = _writer.pulse()
    running_s = time.monotonic() - now.at_s if now.at_s else 0.0
    return _spent | {now.phase: _spent.get(now.phase, 0.0) + running_s}


def detected_s() -> float:
    """How long the supervisor took to notice what ended the start before this one; 0.0 for the first."""
    return _detected_s


def pulse() -> Pulse:
    """What this process reported last."""
    return _writer.pulse()


def part(number: int, total: int | None = None) -> None:
    """Says how far the phase under way is, for the live line: `3/5`. Forgotten with the next beat."""
    global _part
    _part = (_writer.pulse(), f"{number}/{total}" if total else f"{number}")


def part_told() -> str:
    """What `part` said of the phase under way; "" where it said nothing."""
    when, said = _part
    return said if when == _writer.pulse() else ""


_part: tuple[Pulse, str] = (Pulse(), "")


def others() -> dict[int, Pulse]:
    """What the other ranks of this start on this host last told, by rank; {} without a launcher."""
    path = getattr(_writer, "path", "")
    stem, _, own = path.removesuffix(".beat").rpartition("_")
    found = {}
    for name in glob.glob(f"{glob.escape(stem)}_*.beat") if stem else ():
        rank = name.removesuffix(".beat").rpartition("_")[2]
        if rank.isdecimal() and rank != own:
            found[int(rank)] = read(name)
    return found


# Seconds a rank may stay in one phase without a beat, unless set: generous, since a false alarm costs a
# run. A program that never beats stays in `idle`, which has no limit.
DEFAULTS = {"init": 600.0, "compile": 1800.0, "eval": 1800.0, "checkpoint": 1800.0}


@dataclass(frozen=True)
class Limits:
    """Seconds without progress before a rank counts as stuck.

    progress_s: for the phases data, step and collective; None scales it from the median step, max(30 s,
    20 x median), once 20 steps are known; 0 turns the watchdog off. by_phase: overrides and the others.
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
            if not _is_seconds(value) or (equals and name not in PHASES):
                raise ConfigError(
                    f"--hang-timeout={text!r}: {part!r} is not understood. "
                    f"HINT: seconds, 0 for off, or PHASE=seconds with one of {', '.join(PHASES)}."
                )
            if equals:
                by_phase[name] = float(value)
            else:
                progress = float(value)
        return cls(progress, by_phase)

    def of(self, pulse: Pulse, step_s: float | None) -> float | None:
        """The limit for a rank at `pulse`, with the median step `step_s`; None for no limit."""
        if pulse.phase in self.by_phase:
            return self.by_phase[pulse.phase] or None
        if self.progress_s is not None and pulse.phase != "idle":
            compiling = self.by_phase["compile"] if pulse.step < 1 and self.progress_s else 0.0
            return max(self.progress_s, compiling) or None  # the first step compiles
        if step_s is None or pulse.phase not in ("data", "step", "collective"):
            return None
        return max(30.0, 20 * step_s)


def _is_seconds(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdecimal()
