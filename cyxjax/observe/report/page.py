"""The report page: one run from its result to its audit, or several runs side by side."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from cyxjax.observe.report import outcome, predictions
from cyxjax.observe.report.chart import NUM_COLOURS, Line, Mark, bar, line_chart
from cyxjax.observe.report.facts import EPOCHS, SECONDS, Point, RunFacts, flat
from cyxjax.observe.report.html import CSS, Markup, choice, more, paragraph, section, table, text

_FIRST = {"loss": 0, "accuracy": 1}  # order of the plots
_LAST = {"learning_rate": 3, "grad_norm": 4, "samples_per_second": 5}
_CAUSES = {  # of goodput.json; the order gives each the same colour on every page
    "step": "steps that count",
    "compile": "compile",
    "start": "start",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "input": "waiting for data",
    "redone": "repeated steps",
    "restart": "restart",
    "restore": "restore",
}
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # it never loads or runs anything


def page(runs: Sequence[RunFacts]) -> str:
    """The page as HTML: of one run, or of several compared."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{CSS}</style></head><body><h1>{text(title)}</h1>{body}"
        "<footer>Written by cyxjax; it opens offline. Steps are optimizer steps.</footer></body></html>\n"
    )


def _one(run: RunFacts) -> str:
    return "".join(
        (
            outcome.shown(run),
            section("Curves", _legend(_marks(run)), _by_axis([run])),
            section("Where the time went", _time(run)),
            section("Results by class", predictions.matrix(run)),
            section("Test samples", predictions.samples(run)),
            section("Starts", outcome.starts_shown(run)),
            section("Configuration", _configuration(run)),
            section("Environment and fingerprint", _environment(run)),
            section("Audit", _audit(run)),
            section("Not shown", *map(paragraph, run.notes)),
        )
    )


def _quantities(names: Iterable[str]) -> list[str]:
    """The quantities with a curve of training or validation, loss and accuracy first."""
    found = {name.removeprefix("train_").removeprefix("val_") for name in names}
    own = found - {EPOCHS, SECONDS, "seconds"}
    own -= {name for name in own if name.startswith("test_")}
    return sorted(own, key=lambda name: ((_FIRST | _LAST).get(name, 2), name))


Place = Callable[[float], float]
"""step -> its position on an axis"""


class _Axis(NamedTuple):
    name: str  # on the switch
    unit: str  # beside the numbers
    places: list[Place]  # for each run: the positions of its steps


def _axes(runs: Sequence[RunFacts]) -> list[_Axis]:
    """Steps, and epochs and time if every run has them."""
    found = [_Axis("step", "step", [float] * len(runs))]
    for name, key in (("epoch", EPOCHS), ("time", SECONDS)):
        scales = [run.curves.get(key, []) for run in runs]
        if not all(scales):
            continue
        unit, size = name, 1.0
        if key == SECONDS:
            longest = max(scale[-1][1] for scale in scales)
            unit, size = next((u, s) for u, s in _UNITS if longest >= 2 * s or s == 1)
        found.append(_Axis(name, unit, [place_of(scale, size) for scale in scales]))
    return found


def place_of(scale: Sequence[Point], size: float = 1.0) -> Place:
    """Steps to `scale`'s values in units of `size`: from 0 at step 0, straight between its points and beyond
    the last."""
    steps, values = zip((0.0, 0.0), *((step, value) for step, value in scale if step > 0), strict=True)

    def place(step: float) -> float:
        if len(steps) < 2:
            return 0.0
        right = min(max(bisect_left(steps, step), 1), len(steps) - 1)
        rate = (values[right] - values[right - 1]) / (steps[right] - steps[right - 1])
        return (values[right - 1] + (step - steps[right - 1]) * rate) / size

    return place


def _by_axis(runs: Sequence[RunFacts]) -> str:
    """The charts over each axis; the reader selects one axis."""
    drawn = {}
    for axis in _axes(runs):
        placed = [
            replace(run, curves={n: [(place(x), y) for x, y in points] for n, points in run.curves.items()})
            for run, place in zip(runs, axis.places, strict=True)
        ]
        drawn[axis.name] = _plots(placed, axis)
    return choice("Over", drawn) if drawn["step"] else ""


def _plots(runs: Sequence[RunFacts], axis: _Axis) -> str:
    """Charts of one run with its marks, or of several runs in the same plots."""
    alone = len(runs) == 1
    marks = [replace(m, step=axis.places[0](m.step)) for m in _marks(runs[0])] if alone else []
    plots = ""
    for name in _quantities({name for run in runs for name in run.curves}):
        lines = [line for i, run in enumerate(runs) for line in _lines(run, name, i, alone=alone)]
        may_log = "loss" in name or name == "grad_norm"  # its order of magnitude matters
        plots += line_chart(name.replace("_", " "), lines, marks, may_log=may_log, axis=axis.unit)
    return f'<div class="plots">{plots}</div>' if plots else ""


def _lines(run: RunFacts, name: str, colour: int, *, alone: bool) -> list[Line]:
    """The curves of training and validation; for several runs in the colour of the run, validation dashed."""
    every, train, val = (run.curves.get(key, []) for key in (name, f"train_{name}", f"val_{name}"))
    steps = max(train, every, key=len)
    first, second = (f"training {name}", f"validation {name}") if val else (name, "")
    if not alone:
        first, second = run.name, f"{run.name}, validation"
    smooth = name != "learning_rate"  # its exact values matter
    return [
        Line(first, steps, 0 if alone else colour, smooth=smooth),
        Line(second, val, 1 if alone else colour, dashed=not alone, smooth=False),
    ]


def _marks(run: RunFacts) -> list[Mark]:
    marks = []
    for before, after in pairwise(outcome.starts(run.events)):
        kind = "resume" if before.ended else "restart"
        label = f"{kind} at step {after.start_step}, {after.world_size} processes"
        marks.append(Mark(after.start_step, kind, label))
    for event in run.events:
        step = event.get("step")
        if event["event"] in ("save", "rollback") and isinstance(step, int):
            marks.append(Mark(step, event["event"], f"{event['event']} at step {step}"))
    return marks


def _legend(marks: Sequence[Mark]) -> str:
    words = {
        "save": "short tick on the axis: a save",
        "resume": "dashed: a resume",
        "restart": "dashed, amber: a restart after an interruption",
        "rollback": "red: a rollback",
    }
    kinds = {mark.kind for mark in marks}
    return paragraph("; ".join(word for kind, word in words.items() if kind in kinds)) if kinds else ""


def _time(run: RunFacts) -> str:
    names = dict.fromkeys((*_CAUSES, *run.seconds))
    seconds = {_CAUSES.get(name, name): run.seconds.get(name, 0.0) for name in names}
    return bar({name: s if s >= 0.05 else 0.0 for name, s in seconds.items()})


def _configuration(run: RunFacts) -> str:
    changed = [(key, value, run.defaults.get(key, "")) for key, value in run.changed.items()]
    changes = table(("key", "value", "default"), changed) if changed else ""
    every = table(("key", "value"), run.config.items()) if run.config else ""
    return changes + more(f"All {len(run.config)} keys", every)


def _environment(run: RunFacts) -> str:
    start = run.last("start")
    rows, prints = (flat(start.get(name)).items() for name in ("environment", "fingerprint"))
    return (table(("environment", ""), rows) if rows else "") + (
        more("Fingerprint of code and data", table(("what", "digest"), prints)) if prints else ""
    )


def _audit(run: RunFacts) -> str:
    style = {True: "good", False: "bad", None: "note"}[run.audit.good]
    words = {True: "Passed: ", False: "FAILED: ", None: ""}[run.audit.good]
    lines = run.audit.lines[-50:]
    return "".join(
        paragraph((words if i == len(lines) - 1 else "") + line, style) for i, line in enumerate(lines)
    )


def _several(runs: Sequence[RunFacts]) -> str:
    found = {run.folder: outcome.results(run) for run in runs}
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    first = names[0] if names else ""
    runs = sorted(_named(runs), key=lambda run: _rank(first, found[run.folder].get(first)))
    drawn = runs[:NUM_COLOURS]
    of_best = f" Of the {len(drawn)} best." if len(drawn) < len(runs) else ""
    order = f"Sorted by {outcome.spoken(first) or 'name'}, the best first."
    by_run = {
        "Where the time went": [(run.name, _time(run)) for run in drawn],
        "Audit": [(run.name, _audit(run)) for run in drawn],
        "Not shown": [(run.name, "".join(map(paragraph, run.notes))) for run in runs],
    }
    return "".join(
        (
            section("Results", paragraph(order), _results(runs, found, names)),
            section("Curves", paragraph(f"Solid: training; dashed: validation.{of_best}"), _by_axis(drawn)),
            *(
                section(title, *(f"<h3>{text(name)}</h3>{inside}" for name, inside in parts if inside))
                for title, parts in by_run.items()
            ),
        )
    )


def _results(runs: Sequence[RunFacts], found: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """A row for each run: its numbers, the keys of the configuration that differ, and how it ended."""
    swatches = [f'<i class="c{i} swatch"></i>' if i < NUM_COLOURS else "" for i in range(len(runs))]
    columns: dict[str, list[object]] = {
        "run": [
            Markup(f'<span class="name">{swatch}{text(run.name)}</span>')
            for swatch, run in zip(swatches, runs, strict=True)
        ]
    }
    for name in names:
        values = [found[run.folder].get(name) for run in runs]
        columns[outcome.spoken(name)] = ["" if x is None else f"{x:.4g}" for x in values]
    for key in dict.fromkeys(key for run in runs for key in run.config):
        texts = [run.config.get(key, "-") for run in runs]
        if len(set(texts)) > 1 and key != "run_dir":
            columns[key] = list(texts)
    columns["samples/s"] = [f"{run.history.samples_per_second if run.history else 0:,.0f}" for run in runs]
    audits = {True: "passed", False: "FAILED", None: "-"}
    columns["audit"] = [audits[run.audit.good] for run in runs]
    lines = [outcome.headline(run) for run in runs]
    columns["how it ended"] = [Markup(f'<span class="name sentence">{text(x)}</span>') for x in lines]
    return table(list(columns), zip(*columns.values(), strict=True), "numbers")


def _rank(name: str, value: float | None) -> tuple[bool, float]:
    """A sort key, best first: the lowest loss, or the highest value of others; missing values last."""
    return value is None, (value or 0.0) * (1 if name.endswith("loss") else -1)


def _named(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """The runs; those that share a name are named by their folders."""
    names = [run.name for run in runs]
    return [replace(run, name=run.folder) if names.count(run.name) > 1 else run for run in runs]
