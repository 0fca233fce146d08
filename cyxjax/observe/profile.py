"""A trace of some steps, and what it comes to on one page: what ran longest, and what devices waited for."""

import gzip
import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cyxjax.observe.lines import span

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective|psum|pmean|all_gather|reduce_scatter|all_to_all)"
)
_COMPILED = "/jax/core/compile/backend_compile_duration"
_MISS = "TRACING CACHE MISS at "
_EXPLAINING = ("jax._src.interpreters.partial_eval", "jax._src.compiler", "jax._src.compilation_cache")
_MOST_OPS = 15
_MOST_MISSES = 10


class Op(NamedTuple):
    """One execution of an instruction of a compiled program."""

    name: str
    program: str
    start_us: float
    spent_us: float


class Window(NamedTuple):
    """What was measured beside the trace, while it ran."""

    steps: int
    seconds: float
    phases: Mapping[str, float]  # seconds of the host by phase of the loop
    compiled_s: Sequence[float]  # of each program that was compiled
    misses: Sequence[str]  # why: what differed from the programs that were there


class Tracing:
    """A trace that is being taken into `folder`; without Python's own calls, which cost more than steps."""

    def __init__(self, folder: Path, phases: Mapping[str, float]) -> None:
        self._folder, self._phases = folder, dict(phases)
        self._compiled: list[float] = []
        self._misses: list[str] = []
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        jax.monitoring.register_event_duration_secs_listener(self._compile)
        self._explained = jax.config.jax_explain_cache_misses  # type: ignore[attr-defined]
        jax.config.update("jax_explain_cache_misses", True)
        self._kept = _Kept(self._misses)
        for log in map(logging.getLogger, _EXPLAINING):
            log.addFilter(self._kept)
        self._began = time.monotonic()

    def stop(self, steps: int, phases: Mapping[str, float]) -> list[str]:
        """Ends the trace and gives its page; the files are in the folder then."""
        seconds = time.monotonic() - self._began
        for log in map(logging.getLogger, _EXPLAINING):
            log.removeFilter(self._kept)
        jax.config.update("jax_explain_cache_misses", self._explained)
        jax.monitoring.unregister_event_duration_listener(self._compile)
        jax.profiler.stop_trace()
        spent = {name: s - self._phases.get(name, 0.0) for name, s in phases.items()}
        return page(read(self._folder), Window(steps, seconds, spent, self._compiled, self._misses))

    def _compile(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self._compiled.append(duration_secs)


class _Kept(logging.Filter):
    """Keeps what jax explains, and keeps it from the screen."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        text = " ".join(record.getMessage().split())
        if text.startswith(_MISS):
            self._texts.append(text.removeprefix(_MISS))
        return False


def read(folder: Path) -> list[Op]:
    """The instructions in the newest trace below `folder`; [] without one."""
    found = sorted(folder.rglob("perfetto_trace.json.gz"))
    if not found:
        return []
    with gzip.open(found[-1], "rt", encoding="utf-8") as file:
        events = json.load(file)
    events = events["traceEvents"] if isinstance(events, dict) else events
    return [
        Op(event["name"], event["args"].get("hlo_module", ""), event["ts"], event.get("dur", 0.0))
        for event in events
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {})
    ]


def page(ops: Sequence[Op], window: Window) -> list[str]:
    """Lines: where the time of the window went, programs and instructions by time, compilations."""
    total = sum(op.spent_us for op in ops) / 1e6
    wires = sum(op.spent_us for op in ops if _COLLECTIVE.match(op.name)) / 1e6
    idle_s = max(window.seconds - busy_s(ops), 0.0)
    waited_s = window.phases.get("data", 0.0)
    each = window.seconds / max(window.steps, 1)
    lines = [
        f"{window.steps} steps in {span(window.seconds)}, {1000 * each:.2f} ms a step (tracing included)",
        f"input wait   {_share(waited_s, window.seconds)} the loop waited for data",
        f"host gaps    {_share(idle_s, window.seconds)} no device worked on an instruction",
        f"collectives  {_share(wires, total)} of what instructions took (waiting for others included)",
        "",
        "programs by time:",
        *_table(ops, lambda op: op.program, total),
        "",
        "instructions by time:",
        *_table(ops, lambda op: op.name, total),
        "",
        f"compiled in these steps: {len(window.compiled_s)} programs"
        + (f", {span(sum(window.compiled_s))}" if window.compiled_s else ""),
        *(f"  {text}" for text in list(window.misses)[:_MOST_MISSES]),
    ]
    return lines if ops else [*lines[:2], "The trace names no instruction: this backend does not tell them."]


def busy_s(ops: Iterable[Op]) -> float:
    """Seconds in which at least one instruction ran."""
    covered, reached = 0.0, float("-inf")
    for op in sorted(ops, key=lambda op: op.start_us):
        stop = op.start_us + op.spent_us
        covered += max(stop - max(op.start_us, reached), 0.0)
        reached = max(reached, stop)
    return covered / 1e6


def _table(ops: Sequence[Op], key: Any, total_s: float) -> list[str]:
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for op in ops:
        spent[key(op)] += op.spent_us / 1e6
        count[key(op)] += 1
    first = sorted(spent, key=lambda name: -spent[name])[:_MOST_OPS]
    return [f"  {_share(spent[name], total_s)} {count[name]:>7} x  {name[:60]}" for name in first]


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:>5.1%} {1000 * part_s:>10.2f} ms"
