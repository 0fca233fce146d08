"""Reads a run folder for the report; damaged or missing files are listed on the page, not raised."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyxjax.files import dotted, read_json_lines, read_plain
from cyxjax.observe.events import read_events
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.redaction import describe
from cyxjax.run_folder import RunFolder

Point = tuple[float, float]
EPOCHS, SECONDS = "epochs", "total_time_seconds"  # curves that map steps to another axis
_NOT_CURVES = {"step", "epoch", "batch"}
_LARGEST = 1e300  # larger values count as not finite: their differences overflow
_MAX_BYTES = 256 << 20  # a larger metrics file is not read


@dataclass(frozen=True)
class Audit:
    """The result of `cyxjax audit` for a run. `good` None: no audit was made, `lines` say why."""

    good: bool | None
    lines: list[str]


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run that its folder contains."""

    name: str
    folder: str
    history: DistributedTrainingHistory | None = None
    # by name (loss, train_loss, ...): (step, value) in order
    curves: dict[str, list[Point]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # from goodput.json: where the time was spent
    config: dict[str, str] = field(default_factory=dict)  # by dotted key
    defaults: dict[str, str] = field(default_factory=dict)
    audit: Audit = Audit(None, [])
    notes: list[str] = field(default_factory=list)  # what could not be read

    def last(self, event: str) -> dict[str, Any]:
        """The newest event of this name since the newest start; {} if there is none."""
        begun = max((i for i, e in enumerate(self.events) if e["event"] == "start"), default=0)
        return next((e for e in reversed(self.events[begun:]) if e["event"] == event), {})

    @property
    def changed(self) -> dict[str, str]:
        """The configuration values that differ from the defaults."""
        return {key: text for key, text in self.config.items() if self.defaults.get(key) != text}


def read_facts(
    folder: RunFolder,
    config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    audit: Audit | None = None,
) -> RunFacts:
    """The facts of the run in `folder`; config and defaults: plain values, as in YAML."""
    notes: list[str] = []
    history = _try(notes, folder.history, DistributedTrainingHistory.load)
    seconds = _try(notes, folder.goodput, lambda path: json.loads(read_plain(path))["seconds"].items())
    records = _try(notes, folder.metrics, lambda path: read_json_lines(path, _MAX_BYTES))
    curves = curves_of(_by_epoch(history)) if history is not None else {}
    return RunFacts(
        name=folder.root.absolute().name,
        folder=str(folder.root),
        history=history,
        curves=curves | curves_of(records or ()),
        events=read_events(folder.events),
        seconds={name: x for name, value in seconds or () if (x := number(value)) is not None and x >= 0},
        config=flat(config or {}),
        defaults=flat(defaults or {}),
        audit=audit or Audit(None, []),
        notes=notes,
    )


def flat(values: Any) -> dict[str, str]:
    """Nested values as text by dotted key; {} for anything but a mapping."""
    found = dotted(values) if isinstance(values, Mapping) else ()
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in found}


def number(value: Any) -> float | None:
    """`value` as a float; None for anything but a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _LARGEST else None


def _try(notes: list[str], path: Path, read: Callable[[Path], Any]) -> Any:
    """The result of `read(path)`; None, and a note, if the file is missing or invalid."""
    if not os.path.lexists(path):
        notes.append(f"{path.name} does not exist")
        return None
    try:
        return read(path)
    except Exception as err:  # the rest of the page is written in any case
        notes.append(f"{path.name} cannot be read: {describe(err)}")
        return None


def curves_of(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """The finite numbers of records by name and step.

    Of two records of a step the later one is used. The points after the step of a rollback were undone.
    """
    found: dict[str, dict[float, float]] = {}
    for record in records:
        values = {name: x for name, value in record.items() if (x := number(value)) is not None}
        step = values.get("step")
        if step is None or record.get("kind") == "goodput":  # that record is of the whole run
            continue
        if record.get("kind") == "rollback":
            found = {
                name: {at: x for at, x in points.items() if at <= step} for name, points in found.items()
            }
        if "train_loss" in values and "epoch" in values:  # of a whole epoch, counted from 0
            found.setdefault(EPOCHS, {})[step] = values["epoch"] + 1
        for name in values.keys() - _NOT_CURVES:
            found.setdefault(name, {})[step] = values[name]
    return {name: sorted(points.items()) for name, points in sorted(found.items()) if points}


def _by_epoch(history: DistributedTrainingHistory) -> list[dict[str, Any]]:
    """The rows of a history as records, at the steps where their epochs ended."""
    steps = dict(zip(history.epochs, history.steps, strict=False))
    return [{**row, "step": steps.get(int(row["epoch"]))} for row in history.rows()]
