"""The head of the report: the result of a run in one sentence and a few numbers; and its starts."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from cyxjax.files import scaled
from cyxjax.observe.lines import counted, span
from cyxjax.observe.report.chart import short
from cyxjax.observe.report.facts import RunFacts, number
from cyxjax.observe.report.html import paragraph, table, text
from cyxjax.observe.stop_reasons import reason_of


def headline(run: RunFacts) -> str:
    """`Finished: 20 epochs, 440 steps in 3.9 s.`"""
    history, begun = run.history, starts(run.events)
    if history is None or (begun and not begun[-1].ended):
        steps = max((points[-1][0] for points in run.curves.values()), default=0)
        return f"The run is in progress, or was interrupted; step {steps:,.0f} was recorded."
    ended = "Finished" if begun else "Recorded"  # without events it is not known how the run ended
    how = f"Stopped by {reason_of(history.stopped_by).note}" if history.stopped_by else ended
    took = span(history.total_time_seconds)
    done = f"{counted(len(history.train_losses), 'epoch')}, {counted(history.num_steps, 'step')}"
    return f"{how}: {done} in {took}."


def results(run: RunFacts) -> dict[str, float]:
    """Results by name, the most important first: of test samples, best and last validation values."""
    tested = run.last("test").get("metrics")
    found = {f"test {name}": value for name, value in tested.items()} if isinstance(tested, dict) else {}
    for name, best in (("val_accuracy", max), ("val_loss", min)):
        if points := run.curves.get(name):
            found[f"best {name}"] = best(value for _, value in points)
    for name in ("val_accuracy", "val_loss", *run.curves):
        if name in run.curves and (name.startswith("val_") or name == "train_loss"):
            found[f"last {name}"] = run.curves[name][-1][1]
    return {name: x for name, value in found.items() if (x := number(value)) is not None}


def spoken(name: str) -> str:
    """A name of a record as shown on the page: `best validation accuracy`."""
    return name.replace("val_", "validation ").replace("train_", "training ")


def shown(run: RunFacts) -> str:
    """The headline and the tiles, as HTML."""
    order = sorted(results(run).items(), key=lambda item: not item[0].endswith("accuracy"))
    tiles = [
        (spoken(name), f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else short(value)) for name, value in order
    ]
    tiles = tiles[:6]
    if history := run.history:
        has_flops = bool(history.flops_per_second)
        known = [  # name, text, whether it is shown
            ("samples/s", f"{history.samples_per_second:,.0f}", True),
            ("goodput", f"{history.goodput:.0%}", bool(run.seconds)),
            ("samples per step", f"{history.effective_batch_size:,}", True),
            ("processes, replicas", f"{history.world_size}, {history.num_replicas}", True),
            ("peak memory", scaled(history.peak_memory_bytes, "B"), bool(history.peak_memory_bytes)),
            ("per sample", scaled(history.flops_per_sample, "FLOP"), has_flops),
            ("in steps", scaled(history.flops_per_second, "FLOP/s"), has_flops),
            ("of the devices' peak (MFU)", f"{history.mfu:.0%}", bool(history.mfu)),
            ("steps skipped", f"{history.skipped_steps:,}", bool(history.skipped_steps)),
            ("rollbacks", f"{len(history.rollback_steps):,}", bool(history.rollback_steps)),
        ]
        tiles += [(name, value) for name, value, is_shown in known if is_shown]
    drawn = "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in tiles
    )
    return paragraph(headline(run), "lead") + paragraph(_when(run)) + f'<div class="tiles">{drawn}</div>'


def _when(run: RunFacts) -> str:
    began: Any = run.events[0].get("at_unix_s") if run.events else None
    try:
        return f"Begun {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M UTC}, in {run.folder}"
    except (TypeError, OverflowError, ValueError, OSError):
        return f"In {run.folder}"


class Start(NamedTuple):
    """One start of the run: until its end, or until its last event."""

    first_s: float
    stop_s: float
    start_step: int
    stop_step: int
    world_size: int
    ended: bool  # it logged its end; else it was interrupted


def starts(events: Sequence[dict[str, Any]]) -> list[Start]:
    """The starts of a run, in order, each with how it ended."""
    places = [i for i, event in enumerate(events) if event["event"] == "start"]
    return [_start(events[i:stop]) for i, stop in pairwise([*places, len(events)])]


def _start(events: Sequence[dict[str, Any]]) -> Start:
    first = events[0]
    end = next((e for e in events if e["event"] == "end"), None)
    last = end or events[-1]

    def of(event: dict[str, Any], name: str) -> float:
        return number(event.get(name)) or 0.0

    return Start(
        of(first, "at_unix_s"),
        of(last, "at_unix_s"),
        int(of(first, "step")),
        int(of(last, "step")),
        int(of(first, "world_size")),
        end is not None,
    )


def starts_shown(run: RunFacts) -> str:
    """A row for each start; "" without events."""
    rows = [
        (
            i,
            start.world_size,
            start.start_step,
            start.stop_step,
            f"{start.stop_s - start.first_s:,.1f} s",
            "ended" if start.ended else "interrupted (until its last event)",
        )
        for i, start in enumerate(starts(run.events), 1)
    ]
    head = ("start", "processes", "from step", "to step", "time", "how it ended")
    return table(head, rows, "numbers") if rows else ""
