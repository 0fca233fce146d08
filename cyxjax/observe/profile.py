"""Traces some steps and summarises them: the longest operations, and where devices waited."""

import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cyxjax.observe.lines import span

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective|psum|pmean|all_gather|reduce_scatter|all_to_all)"
)
_COMPILED = "/jax/core/compile/backend_compile_duration"
_MOST_OPS = 15


class Op(NamedTuple):
    """One execution of an instruction of a compiled program."""

    name: str
    program: str
    start_us: float
    spent_us: float


class Tracing:
    """A trace that is written into `folder`, without Python calls, which would cost more than the steps."""

    def __init__(self, folder: Path, phases: Mapping[str, float]) -> None:
        self._folder, self._phases = folder, dict(phases)
        self._compiled: list[float] = []
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        jax.monitoring.register_event_duration_secs_listener(self._compile)
        self._began = time.monotonic()

    def stop(self, steps: int, phases: Mapping[str, float]) -> list[str]:
        """Ends the trace and writes its files; returns the lines of its summary."""
        seconds = time.monotonic() - self._began
        jax.monitoring.unregister_event_duration_listener(self._compile)
        jax.profiler.stop_trace()
        input_s = phases.get("data", 0.0) - self._phases.get("data", 0.0)
        return page(read(self._folder), steps, seconds, input_s, self._compiled)

    def _compile(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self._compiled.append(duration_secs)


def read(folder: Path) -> list[Op]:
    """The instructions in the newest trace below `folder`."""
    newest = max(folder.rglob("perfetto_trace.json.gz"))
    with gzip.open(newest, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [
        Op(event["name"], event["args"].get("hlo_module", ""), event["ts"], event.get("dur", 0.0))
        for event in events
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {})
    ]


def page(
    ops: Sequence[Op], steps: int, seconds: float, input_s: float, compiled_s: Sequence[float]
) -> list[str]:
    """Lines: where the time of the window went, programs and instructions by time, compilations.

    seconds: of the window; input_s: its part waiting for data; compiled_s: of each program compiled in it.
    """
    each_ms = 1000 * seconds / max(steps, 1)
    lines = [
        f"{steps} steps in {span(seconds)}, {each_ms:.2f} ms per step (tracing included)",
        f"input wait   {_share(input_s, seconds)} the loop waited for data",
    ]
    if not ops:
        return [*lines, "The trace names no instruction: this backend does not report them."]
    idle_s = max(seconds - busy_s(ops), 0.0)
    exchange_s = sum(op.spent_us for op in ops if _COLLECTIVE.match(op.name)) / 1e6
    total_s = sum(op.spent_us for op in ops) / 1e6  # the sum over devices
    return [
        *lines,
        f"host gaps    {_share(idle_s, seconds)} no device worked on an instruction",
        f"collectives  {_share(exchange_s, total_s)} of instruction time (waiting for others included)",
        "",
        "programs by time, with the number of instructions that ran:",
        *_longest(ops, lambda op: op.program, total_s),
        "",
        "instructions by time, with the number of times they ran:",
        *_longest(ops, lambda op: op.name, total_s),
        "",
        f"compiled in these steps: {len(compiled_s)} programs"
        + (f", {span(sum(compiled_s))}" if compiled_s else ""),
    ]


def busy_s(ops: Iterable[Op]) -> float:
    """Seconds in which at least one instruction ran."""
    covered, reached = 0.0, float("-inf")
    for op in sorted(ops, key=lambda op: op.start_us):
        stop = op.start_us + op.spent_us
        covered += max(stop - max(op.start_us, reached), 0.0)
        reached = max(reached, stop)
    return covered / 1e6


def _longest(ops: Sequence[Op], key: Callable[[Op], str], total_s: float) -> list[str]:
    """Lines: time and number of instructions by `key` of them, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for op in ops:
        spent[key(op)].append(op.spent_us / 1e6)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:_MOST_OPS]
    return [f"  {_share(sum(took), total_s)} {len(took):>7} x  {name[:60]}" for name, took in longest]


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:>5.1%} {1000 * part_s:>10.2f} ms"
