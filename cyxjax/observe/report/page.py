"""The report page: one run from its result to its audit, or several runs side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cyxjax.files import write_whole
from cyxjax.observe.report import outcome, predictions, ranks
from cyxjax.observe.report.chart import NUM_COLOURS, Line, Mark, bar, line_chart
from cyxjax.observe.report.curves import EPOCHS, SECONDS, Curve, Place, place_of
from cyxjax.observe.report.facts import RunFacts, flat, number
from cyxjax.observe.report.html import CSS, Markup, choice, more, said, section, sortable, table, text

_NONE = Curve([])
_SINGLE = {  # curves drawn alone, under these titles
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm (before clipping)",
    "samples_per_second": "samples/s",
}
_EXACT = ("learning_rate",)  # nothing to smooth: each value is what was used
_CAUSES = {  # of goodput.json, in an order that gives each the same colour on every page
    "step": "steps that count",
    "compile": "compile",
    "start": "start",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "input": "waiting for data",
    "redone": "steps done again",
    "restart": "restart",
    "restore": "restore",
    "detect": "until a loss was noticed",
}
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_MOST_DRAWN = NUM_COLOURS  # of many runs, whose curves are shown
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # it never loads or runs anything


def write(path: Path, runs: Sequence[RunFacts]) -> None:
    """Puts the page of `runs` at `path`, whole. Raises: OSError."""
    write_whole(path, page(runs))


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
            section("Curves", _legend(_marks(run)), _by_axis([run]), name="curves"),
            section("Where the time went", _time(run), name="time"),
            section("Results by class", predictions.matrix(run), name="predictions"),
            section("Test samples", predictions.samples(run), name="samples"),
            section("Starts and ranks", ranks.shown(run), name="ranks"),
            section("Configuration", _configuration(run), name="configuration"),
            section("Environment and fingerprint", _environment(run), name="environment"),
            section("Audit", _audit(run), name="audit"),
            section("Not shown", *map(said, run.notes), name="notes") if run.notes else "",
        )
    )


def _pairs(names: Iterable[str]) -> list[str]:
    """Quantities that have a training or validation curve, loss and accuracy first."""
    found = {name.removeprefix("train_").removeprefix("val_") for name in names}
    own = found - {*_SINGLE, EPOCHS, SECONDS, "seconds", "kind"}
    own -= {name for name in own if name.startswith("test_")}
    return sorted(own, key=lambda name: ({"loss": 0, "accuracy": 1}.get(name, 2), name))


class _Axis(NamedTuple):
    name: str  # on the switch
    unit: str  # beside the numbers
    places: list[Place]  # of each run: where its steps lie


def _axes(runs: Sequence[RunFacts]) -> list[_Axis]:
    """Steps, and epochs and time where every run knows them."""
    found = [_Axis("step", "step", [float] * len(runs))]
    for name, key in (("epoch", EPOCHS), ("time", SECONDS)):
        scales = [run.curves.get(key, _NONE) for run in runs]
        if not all(scale.points for scale in scales):
            continue
        unit, size = name, 1.0
        if key == SECONDS:
            longest = max(scale.values[-1] for scale in scales)
            unit, size = next((u, s) for u, s in _UNITS if longest >= 2 * s or s == 1)
        scales = [Curve([(step, value / size) for step, value in scale.points]) for scale in scales]
        found.append(_Axis(name, unit, [place_of(scale) for scale in scales]))
    return found


def _by_axis(runs: Sequence[RunFacts]) -> str:
    """The charts over each axis, of which the reader chooses one."""
    drawn = {}
    for axis in _axes(runs):
        placed = [
            replace(run, curves={name: curve.moved(place) for name, curve in run.curves.items()})
            for run, place in zip(runs, axis.places, strict=True)
        ]
        drawn[axis.name] = _plots(placed, axis)
    return choice("Over", drawn) if drawn["step"] else ""


def _plots(runs: Sequence[RunFacts], axis: _Axis) -> str:
    """Charts of one run with its marks, or of several runs laid over each other."""
    alone = len(runs) == 1
    marks = [replace(m, step=axis.places[0](m.step)) for m in _marks(runs[0])] if alone else []
    plots: list[str] = []
    of_classes: list[str] = []
    for name in _pairs({name for run in runs for name in run.curves}):
        lines = [line for i, run in enumerate(runs) for line in _lines(run, name, i, alone=alone)]
        drawn = line_chart(name, lines, marks, may_log=_may_log(name), axis=axis.unit)
        (of_classes if outcome.by_class(name) else plots).append(drawn)
    for name, title in _SINGLE.items():
        lines = []
        for i, run in enumerate(runs):
            curve = run.curves.get(name) or run.curves.get(f"train_{name}", _NONE)
            label, colour = (name.replace("_", " "), 2) if alone else (run.name, i)
            smooth = name not in _EXACT
            lines.append(Line(label, curve.points, colour, broken=curve.broken, smooth=smooth))
        plots.append(line_chart(title, lines, marks, may_log=_may_log(name), axis=axis.unit))
    return _gathered(plots, of_classes)


def _lines(run: RunFacts, name: str, colour: int, *, alone: bool) -> list[Line]:
    """The curves of training and validation; of several runs in the colour of the run, the second dashed."""
    every, train, val = (run.curves.get(key, _NONE) for key in (name, f"train_{name}", f"val_{name}"))
    steps = every if len(every.points) + len(every.broken) > len(train.points) else train
    first, second = (
        (f"training {name}", f"validation {name}") if alone else (run.name, f"{run.name}, validation")
    )
    return [
        Line(first, steps.points, 0 if alone else colour, broken=steps.broken),
        Line(second, val.points, 1 if alone else colour, not alone, False, val.broken),
    ]


def _gathered(plots: Sequence[str], of_classes: Sequence[str]) -> str:
    """Charts beside each other; those of single classes, which may be hundreds, folded below."""
    first, folded = "".join(plots), "".join(of_classes)
    inside = f'<div class="plots">{folded}</div>' if folded else ""
    return (f'<div class="plots">{first}</div>' if first else "") + more("Curves of each class", inside)


def _may_log(name: str) -> bool:
    """Whether what counts of a quantity is its order of magnitude."""
    return "loss" in name or name == "grad_norm"


def _marks(run: RunFacts) -> list[Mark]:
    marks = []
    for before, after in pairwise(ranks.stretches(run.events)):
        kind = "resume" if before.ended else "restart"
        label = f"{kind} at step {after.start_step}, {after.world_size} processes"
        marks.append(Mark(after.start_step, kind, label))
    for event in run.events[-2000:]:
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
    return said("; ".join(word for kind, word in words.items() if kind in kinds)) if kinds else ""


def _time(run: RunFacts) -> str:
    order = [name for name in _CAUSES if name in run.seconds] and list(_CAUSES)
    order += sorted(set(run.seconds) - set(_CAUSES))
    shown = {name: run.seconds.get(name, 0.0) for name in order}
    return bar(
        {_CAUSES.get(name, name): seconds if seconds >= 0.05 else 0.0 for name, seconds in shown.items()}
    )


def _configuration(run: RunFacts) -> str:
    changed = [(key, value, run.defaults[key]) for key, value in run.changed.items()]
    every = more(f"All {len(run.config)} keys", table(("key", "value"), run.config.items()))
    if not run.config:
        return ""
    changes = (
        table(("key", "value", "default"), changed) if changed else said("Nothing differs from the defaults.")
    )
    return changes + every


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
    return "".join(said((words if i == len(lines) - 1 else "") + line, style) for i, line in enumerate(lines))


def _several(runs: Sequence[RunFacts]) -> str:
    found = {run.folder: outcome.overall(run) for run in runs}
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    first = next(iter(names), "")
    runs = sorted(_named(runs), key=lambda run: _rank(found[run.folder].get(first), first))
    drawn = runs[:_MOST_DRAWN]
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    words = [f"Sorted by {outcome.spoken(first)}, the best first.", "Choose a column to sort by it."]
    of_best = f" Of the {len(drawn)} best." if len(drawn) < len(runs) else ""
    return "".join(
        (
            section(
                "Results", said(" ".join(words[not first :])), _results(runs, found, names), name="results"
            ),
            section(
                "Curves",
                said(f"Solid: training; dashed: validation.{of_best}"),
                _by_axis(drawn),
                name="curves",
            ),
            section(
                "Where the time went",
                *(f"<h3>{text(r.name)}</h3>{_time(r)}" for r in drawn if r.seconds),
                name="time",
            ),
            section(
                "Audit",
                *(f"<h3>{text(r.name)}</h3>{_audit(r)}" for r in drawn if r.audit.lines),
                name="audit",
            ),
            section("Not shown", *map(said, notes), name="notes"),
        )
    )


def _results(runs: Sequence[RunFacts], found: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """A row for each run: its numbers, the keys of the configuration that differ, and how it ended."""
    columns: dict[str, list[tuple[object, object]]] = {"run": []}  # each cell, and what it is sorted by
    for i, run in enumerate(runs):
        swatch = f'<i class="c{i} swatch"></i>' if i < _MOST_DRAWN else ""
        columns["run"].append((Markup(f'<span class="name">{swatch}{text(run.name)}</span>'), run.name))
    for name in (name for name in names if not name.startswith("last ")):
        columns[outcome.spoken(name)] = _numbers(name, [found[run.folder].get(name) for run in runs])
    for key in dict.fromkeys(key for run in runs for key in run.config):
        texts = [run.config.get(key, "-") for run in runs]
        if len(set(texts)) > 1 and key != "run_dir":
            columns[key] = [(value, _ordered(value)) for value in texts]
    for name in (name for name in names if name.startswith("last ")):
        columns[outcome.spoken(name)] = _numbers(name, [found[run.folder].get(name) for run in runs])
    speeds = [run.history.samples_per_second if run.history else None for run in runs]
    columns["samples/s"] = _numbers("", speeds, ",.0f")
    audits = {True: "passed", False: "FAILED", None: "-"}
    columns["audit"] = [(audits[run.audit.good], audits[run.audit.good]) for run in runs]
    lines = [outcome.headline(run) for run in runs]
    columns["how it ended"] = [
        (Markup(f'<span class="name sentence">{text(line)}</span>'), line) for line in lines
    ]
    return sortable(columns)


def _numbers(name: str, values: Sequence[float | None], form: str = ".4g") -> list[tuple[object, object]]:
    return [("" if value is None else format(value, form), _rank(value, name)) for value in values]


def _rank(value: float | None, name: str) -> tuple[bool, float]:
    """The best first: the lowest loss, the highest of all else; what is missing last."""
    return value is None, (value or 0.0) * (1 if name.endswith("loss") else -1)


def _ordered(value: str) -> tuple[bool, float, str]:
    """Numbers by size, before texts."""
    size = number(value)
    return size is None, size or 0.0, value


def _named(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Runs of the same name are called by their folders."""
    names = [run.name for run in runs]
    return [replace(run, name=run.folder) if names.count(run.name) > 1 else run for run in runs]
