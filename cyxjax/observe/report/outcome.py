"""The head of the report: the result of a run in one sentence and a few numbers."""

import math
import re
from datetime import UTC, datetime

from cyxjax.observe.lines import counted, scaled, span
from cyxjax.observe.report.curves import short
from cyxjax.observe.report.facts import RunFacts, number
from cyxjax.observe.report.html import said, text
from cyxjax.observe.stop_reasons import reason_of

_OF_A_CLASS = re.compile(r"(?:^| |val_|train_)(?:recall|precision)_.")


def headline(run: RunFacts) -> str:
    """`Finished: 20 epochs, 440 steps in 3.9 s.`"""
    history = run.history
    if history is None:
        steps = max((curve.points[-1][0] for curve in run.curves.values() if curve.points), default=0)
        return f"No history.json: the run is under way, or was cut short; step {steps:,.0f} was recorded."
    how = f"Stopped by {reason_of(history.stopped_by).note}" if history.stopped_by else "Finished"
    took = span(history.total_time_seconds)
    done = f"{counted(len(history.train_losses), 'epoch')}, {counted(history.num_steps, 'step')}"
    return f"{how}: {done} in {took}."


def results(run: RunFacts) -> dict[str, float]:
    """What came out, by name, the most telling first: of the test samples, the best and last validation."""
    found: dict[str, float] = {}
    tested = run.last("test").get("metrics")
    for name, value in (tested if isinstance(tested, dict) else {}).items():
        found[f"test {name}"] = math.nan if (x := number(value)) is None else x
    for name in ("val_accuracy", "val_loss"):
        values = run.curves[name].values if name in run.curves else []
        if values:
            found[f"best {name}"] = max(values) if name.endswith("accuracy") else min(values)
            found[f"last {name}"] = values[-1]
    for name, curve in run.curves.items():
        if name.startswith("val_") and name not in ("val_accuracy", "val_loss") and curve.values:
            found[f"last {name}"] = curve.values[-1]
    if "train_loss" in run.curves and run.curves["train_loss"].values:
        found["last train_loss"] = run.curves["train_loss"].values[-1]
    return {name: value for name, value in found.items() if math.isfinite(value)}


def spoken(name: str) -> str:
    """A name of a record as the page says it: `best validation accuracy`."""
    return name.replace("val_", "validation ").replace("train_", "training ")


def by_class(name: str) -> bool:
    """Whether a number is one of the many that `per_class` gives: `recall_cat`, `last val_precision_3`."""
    return _OF_A_CLASS.search(name) is not None


def overall(run: RunFacts) -> dict[str, float]:
    """`results` but for those of a single class, which have a place of their own on the page."""
    return {name: value for name, value in results(run).items() if not by_class(name)}


def shown(run: RunFacts) -> str:
    """The sentence and the tiles."""
    history, tiles = run.history, []
    order = sorted(overall(run).items(), key=lambda item: not item[0].endswith("accuracy"))
    for name, value in order[:6]:
        tiles.append((name, f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else short(value)))
    if history is not None:
        has_flops = bool(history.flops_per_second)
        known = [  # name, text, whether it is known and worth a tile
            ("samples/s", f"{history.samples_per_second:,.0f}", True),
            ("goodput", f"{history.goodput:.0%}", bool(run.seconds)),
            ("samples per step", f"{history.effective_batch_size:,}", True),
            ("processes x replicas", f"{history.world_size} x {_each(history)}", True),
            ("peak memory", scaled(history.peak_memory_bytes, "B"), bool(history.peak_memory_bytes)),
            ("per sample", scaled(history.flops_per_sample, "FLOP"), has_flops),
            ("in steps", scaled(history.flops_per_second, "FLOP/s"), has_flops),
            ("of the devices' peak (MFU)", f"{history.mfu:.0%}", bool(history.mfu)),
            ("steps skipped", f"{history.skipped_steps:,}", bool(history.skipped_steps)),
            ("rollbacks", f"{len(history.rollback_steps):,}", bool(history.rollback_steps)),
        ]
        tiles += [(name, value) for name, value, is_shown in known if is_shown]
    drawn = "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(spoken(name))}</span></div>'
        for name, value in tiles
    )
    return said(headline(run), "lead") + said(_when(run)) + f'<div class="tiles">{drawn}</div>'


def _each(history) -> str:  # type: ignore[no-untyped-def]  # a DistributedTrainingHistory
    each = history.num_replicas / max(history.world_size, 1)
    return f"{each:.0f}" if each == int(each) else f"{each:.1f}"


def _when(run: RunFacts) -> str:
    began = number(run.events[0].get("at_unix_s")) if run.events else None
    try:
        when = datetime.fromtimestamp(began or 0, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        began = None
    return f"Begun {when}, in {run.folder}" if began else f"In {run.folder}"
