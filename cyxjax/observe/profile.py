"""Traces some steps and summarises them: the longest operations, and what the devices waited for."""

import gzip
import json
import logging
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
_MISS = "TRACING CACHE MISS at "
_EXPLAINING = ("jax._src.interpreters.partial_eval", "jax._src.compiler", "jax._src.compilation_cache")
_MOST_OPS = 15
_MOST_MISSES = 10
_MOST_RANKS = 12


class Op(NamedTuple):
    """One execution of an instruction of a compiled program."""

    name: str
    program: str
    start_us: float
    spent_us: float


class Measured(NamedTuple):
    """What a rank's window came to: seconds of the host, and of instructions. Plain values, sent as JSON."""

    steps: int
    seconds: float
    input_s: float  # the loop waited for data
    idle_s: float  # no device worked on an instruction
    wires_s: float  # of instructions that exchange values, waiting for others included
    total_s: float  # of all instructions; of devices side by side the sum
    compiled: int  # programs
    compiled_s: float
    programs: Mapping[str, Sequence[float]]  # (seconds, how often) by name, those that took longest
    instructions: Mapping[str, Sequence[float]]


class Tracing:
    """A trace that writes into `folder`; without Python's own calls, which cost more than steps."""

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
        for log in map(logging.getLogger, _EXPLAINING):
            log.addFilter(self._keep)
        self._began = time.monotonic()

    def stop(self, steps: int, phases: Mapping[str, float]) -> tuple[list[str], Measured]:
        """Ends the trace; its page, and what that is drawn from. The files are in the folder then."""
        seconds = time.monotonic() - self._began
        for log in map(logging.getLogger, _EXPLAINING):
            log.removeFilter(self._keep)
        jax.config.update("jax_explain_cache_misses", self._explained)
        jax.monitoring.unregister_event_duration_listener(self._compile)
        jax.profiler.stop_trace()
        input_s = phases.get("data", 0.0) - self._phases.get("data", 0.0)
        found = measured(read(self._folder), steps, seconds, input_s, self._compiled)
        return page(found, self._misses), found

    def _keep(self, record: logging.LogRecord) -> bool:
        """Keeps what jax explains, and keeps it from the screen."""
        text = " ".join(record.getMessage().split())
        if text.startswith(_MISS):
            self._misses.append(text.removeprefix(_MISS))
        return False

    def _compile(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self._compiled.append(duration_secs)


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


def measured(
    ops: Sequence[Op], steps: int, seconds: float, input_s: float, compiled_s: Sequence[float]
) -> Measured:
    """seconds: of the window; input_s: of it, waiting for data; compiled_s: of each program made in it."""
    return Measured(
        steps=steps,
        seconds=seconds,
        input_s=input_s,
        idle_s=max(seconds - busy_s(ops), 0.0),
        wires_s=sum(op.spent_us for op in ops if _COLLECTIVE.match(op.name)) / 1e6,
        total_s=sum(op.spent_us for op in ops) / 1e6,
        compiled=len(compiled_s),
        compiled_s=sum(compiled_s),
        programs=_longest(ops, lambda op: op.program),
        instructions=_longest(ops, lambda op: op.name),
    )


def page(found: Measured, misses: Sequence[str]) -> list[str]:
    """Lines: where the time of the window went, programs and instructions by time, compilations.

    misses: why programs were compiled, what differed from those that were there.
    """
    lines = [
        f"{found.steps} steps in {span(found.seconds)}, {_each_ms(found):.2f} ms a step (tracing included)",
        f"input wait   {_share(found.input_s, found.seconds)} the loop waited for data",
    ]
    if not found.programs:
        return [*lines, "The trace names no instruction: this backend does not report them."]
    return [
        *lines,
        f"host gaps    {_share(found.idle_s, found.seconds)} no device worked on an instruction",
        f"collectives  {_share(found.wires_s, found.total_s)} of what instructions took "
        "(waiting for others included)",
        "",
        "programs by time:",
        *_table(found.programs, found.total_s),
        "",
        "instructions by time:",
        *_table(found.instructions, found.total_s),
        "",
        f"compiled in these steps: {found.compiled} programs"
        + (f", {span(found.compiled_s)}" if found.compiled else ""),
        *(f"  {text}" for text in misses[:_MOST_MISSES]),
    ]


def busy_s(ops: Iterable[Op]) -> float:
    """Seconds in which at least one instruction ran."""
    covered, reached = 0.0, float("-inf")
    for op in sorted(ops, key=lambda op: op.start_us):
        stop = op.start_us + op.spent_us
        covered += max(stop - max(op.start_us, reached), 0.0)
        reached = max(reached, stop)
    return covered / 1e6


def _table(spent: Mapping[str, Sequence[float]], total_s: float) -> list[str]:
    return [
        f"  {_share(seconds, total_s)} {count:>7} x  {name[:60]}" for name, (seconds, count) in spent.items()
    ]


def _longest(ops: Sequence[Op], key: Callable[[Op], str]) -> dict[str, tuple[float, int]]:
    """(seconds, how often) by what `key` says of an instruction, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for op in ops:
        spent[key(op)].append(op.spent_us / 1e6)
    longest = sorted(spent, key=lambda name: -sum(spent[name]))[:_MOST_OPS]
    return {name: (sum(spent[name]), len(spent[name])) for name in longest}


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:>5.1%} {1000 * part_s:>10.2f} ms"


def group_page(ranks: Sequence[Measured | str]) -> list[str]:
    """Lines. ranks: by rank what it measured, or why it has nothing."""
    known = {rank: found for rank, found in enumerate(ranks) if isinstance(found, Measured)}
    unprofiled = [f"rank {rank}: no profile: {why}" for rank, why in enumerate(ranks) if isinstance(why, str)]
    if not known:
        return [f"{len(ranks)} processes, none with a profile", *unprofiled]
    slowest = max(known, key=lambda rank: _each_ms(known[rank]))
    late = sorted(known, key=lambda rank: known[rank].wires_s)[:_MOST_RANKS]
    return [
        f"{len(ranks)} processes, {known[slowest].steps} steps, {_each_ms(known[slowest]):.2f} ms a step on "
        f"the slowest, rank {slowest} (tracing included)",
        "",
        "those first that spent least in collectives: a rank for which the others wait comes late to them",
        "rank   ms a step   input wait   host gaps   collectives   compiled",
        *(_row(rank, known[rank]) for rank in late),
        *unprofiled,
        "",
        "programs by time, on all ranks:",
        *_names([found.programs for found in known.values()]),
        "",
        "instructions by time, on all ranks:",
        *_names([found.instructions for found in known.values()]),
    ]


def _row(rank: int, found: Measured) -> str:
    """The shares of a rank's window; collectives of what its instructions took."""
    wait, gaps = (part / found.seconds for part in (found.input_s, found.idle_s))
    wires = found.wires_s / (found.total_s or 1)
    compiled = f"{found.compiled} in {span(found.compiled_s)}"
    return f"{rank:>4}{_each_ms(found):>12.2f}{wait:>13.1%}{gaps:>12.1%}{wires:>14.1%}   {compiled}"


def _names(ranks: Sequence[Mapping[str, Sequence[float]]]) -> list[str]:
    """Each name's share of all, and how long it took on the rank where it took least and most."""
    names = dict.fromkeys(name for found in ranks for name in found)
    spent = {name: [found[name][0] if name in found else 0.0 for found in ranks] for name in names}
    whole = sum(map(sum, spent.values())) or 1
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:_MOST_OPS]
    return [
        f"  {sum(on) / whole:>6.1%}  {1000 * min(on):.2f} to {1000 * max(on):.2f} ms  {name[:50]}"
        for name, on in longest
    ]


def _each_ms(found: Measured) -> float:
    return 1000 * found.seconds / max(found.steps, 1)
