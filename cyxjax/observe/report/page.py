"""The page itself: one run from its outcome down to its audit, or several beside each other."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from cyxjax.files import write_whole
from cyxjax.observe.report import confusion, outcome, ranks, samples
from cyxjax.observe.report.chart import NUM_COLOURS, Line, Mark, bar, line_chart
from cyxjax.observe.report.curves import Curve, short
from cyxjax.observe.report.facts import RunFacts
from cyxjax.observe.report.html import Markup, more, said, section, table, text
from cyxjax.observe.report.style import CSS

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
            section("Curves", _plots(run), _epochs(run), name="curves"),
            section("Where the time went", _time(run), name="time"),
            section("Results by class", confusion.shown(run), name="predictions"),
            section("Test samples", samples.shown(run), name="samples"),
            section("Ranks over time", ranks.shown(run), name="ranks"),
            section("Configuration", _configuration(run), name="configuration"),
            section("Environment and fingerprint", _environment(run), name="environment"),
            section("Audit", _audit(run), name="audit"),
            section("Not shown", *map(said, run.notes), name="notes") if run.notes else "",
        )
    )


def _pairs(names: Iterable[str]) -> list[str]:
    """Quantities that have a training or validation curve, loss and accuracy first."""
    found = {name.removeprefix("train_").removeprefix("val_") for name in names}
    own = (
        found - set(_SINGLE) - {"seconds", "kind"} - {n for n in found if n.startswith(("seconds_", "test_"))}
    )
    return sorted(own, key=lambda name: ({"loss": 0, "accuracy": 1}.get(name, 2), name))


def _plots(run: RunFacts) -> str:
    marks = _marks(run)
    plots: list[str] = []
    of_classes: list[str] = []
    for name in _pairs(run.curves):
        every, train, val = (run.curves.get(key, _NONE) for key in (name, f"train_{name}", f"val_{name}"))
        steps = every if len(every.points) + len(every.broken) > len(train.points) else train
        lines = [
            Line(f"training {name}", steps.points, 0, broken=steps.broken),
            Line(f"validation {name}", val.points, 1, smooth=False, broken=val.broken),
        ]
        drawn = line_chart(name, lines, marks, may_log=_may_log(name))
        (of_classes if outcome.by_class(name) else plots).append(drawn)
    for name, title in _SINGLE.items():
        curve = run.curves.get(name) or run.curves.get(f"train_{name}", _NONE)
        line = Line(name.replace("_", " "), curve.points, 2, broken=curve.broken, smooth=name not in _EXACT)
        plots.append(line_chart(title, [line], marks, may_log=_may_log(name)))
    drawn = _gathered(plots, of_classes)
    return f"{_legend(marks)}{drawn}" if drawn else ""


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


def _epochs(run: RunFacts) -> str:
    """Numbers by epoch, folded."""
    names = [n for n in run.curves if n.startswith(("train_", "val_"))]
    steps = sorted({step for name in names for step, _ in run.curves[name].points})
    if not steps:
        return ""
    by_name = {name: dict(run.curves[name].points) for name in names}
    kept = steps if len(steps) <= 200 else steps[:: -(-len(steps) // 200)]
    rows = [
        (f"{step:,.0f}", *(short(by_name[n][step]) if step in by_name[n] else "" for n in names))
        for step in kept
    ]
    return more("Numbers by epoch", table(("step", *names), rows, "numbers"))


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
    told = (
        table(("key", "value", "default"), changed) if changed else said("Nothing differs from the defaults.")
    )
    return told + every


def _environment(run: RunFacts) -> str:
    start = run.last("start")
    rows = [(name, value) for name, value in _flat(start.get("environment"))]
    prints = [(name, value) for name, value in _flat(start.get("fingerprint"))]
    return (table(("environment", ""), rows) if rows else "") + (
        more("Fingerprint of code and data", table(("what", "digest"), prints)) if prints else ""
    )


def _flat(values: object) -> list[tuple[str, str]]:
    if not isinstance(values, dict):
        return []
    return [
        (str(name), value if isinstance(value, str) else short_list(value)) for name, value in values.items()
    ]


def short_list(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _audit(run: RunFacts) -> str:
    style = {True: "good", False: "bad", None: "note"}[run.audit.good]
    words = {True: "Passed: ", False: "FAILED: ", None: ""}[run.audit.good]
    lines = run.audit.lines[-50:]
    return "".join(said((words if i == len(lines) - 1 else "") + line, style) for i, line in enumerate(lines))


def _several(runs: Sequence[RunFacts]) -> str:
    runs = _named(runs)
    found = [outcome.overall(run) for run in runs]
    names = list(dict.fromkeys(name for one in found for name in one))
    key = next(iter(names), "")
    best_last = key.endswith("loss")
    order = sorted(range(len(runs)), key=lambda i: _rank(found[i].get(key), best_last))
    rows = [
        (
            Markup(
                f'<span class="name"><i class="c{i % NUM_COLOURS} swatch"></i>{text(runs[i].name)}</span>'
            ),
            *(f"{found[i][n]:.4g}" if n in found[i] else "" for n in names),
            f"{history.samples_per_second:,.0f}" if (history := runs[i].history) else "",
            Markup(f'<span class="name sentence">{text(outcome.headline(runs[i]))}</span>'),
        )
        for i in order
    ]
    results = table(("run", *names, "samples/s", "how it ended"), rows, "numbers")
    keys = [k for k in dict.fromkeys(k for run in runs for k in run.config) if _differs(runs, k)]
    differing = table(
        ("key", *(runs[i].name for i in order)),
        ([k, *(runs[i].config.get(k, "-") for i in order)] for k in keys),
    )
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return "".join(
        (
            section(
                "Results", said(f"Sorted by {key}, the best first.") if key else "", results, name="results"
            ),
            section("Curves", said("Dashed: validation."), _overlaid(runs), name="curves"),
            section(
                "What differs in their configuration",
                differing if keys else said("Nothing."),
                name="differing",
            ),
            section(
                "Where the time went", *(f"<h3>{text(r.name)}</h3>{_time(r)}" for r in runs if r.seconds)
            ),
            section(
                "Audit", *(f"<h3>{text(r.name)}</h3>{_audit(r)}" for r in runs if r.audit.lines), name="audit"
            ),
            section("Not shown", *map(said, notes), name="notes"),
        )
    )


def _rank(value: float | None, low_is_good: bool) -> tuple[bool, float]:
    return value is None, (value or 0.0) * (1 if low_is_good else -1)


def _differs(runs: Sequence[RunFacts], key: str) -> bool:
    return len({run.config.get(key, "-") for run in runs}) > 1


def _named(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Runs of the same name are called by their folders."""
    names = [run.name for run in runs]
    return [replace(run, name=run.folder) if names.count(run.name) > 1 else run for run in runs]


def _overlaid(runs: Sequence[RunFacts]) -> str:
    plots: list[str] = []
    of_classes: list[str] = []
    every = {name for run in runs for name in run.curves}
    for name in _pairs(every):
        lines = []
        for i, run in enumerate(runs):
            steps, train = run.curves.get(name, _NONE), run.curves.get(f"train_{name}", _NONE)
            shown = steps if len(steps.points) > len(train.points) else train
            val = run.curves.get(f"val_{name}", _NONE)
            lines.append(Line(run.name, shown.points, i, broken=shown.broken))
            lines.append(Line(f"{run.name}, validation", val.points, i, True, False, val.broken))
        drawn = line_chart(name, lines, may_log=_may_log(name))
        (of_classes if outcome.by_class(name) else plots).append(drawn)
    for name, title in _SINGLE.items():
        curves = [run.curves.get(name) or run.curves.get(f"train_{name}", _NONE) for run in runs]
        lines = [
            Line(r.name, c.points, i, broken=c.broken, smooth=name not in _EXACT)
            for i, (r, c) in enumerate(zip(runs, curves, strict=True))
        ]
        plots.append(line_chart(title, lines, may_log=_may_log(name)))
    return _gathered(plots, of_classes)
