"""Reads a run folder for the report; damaged or missing files are listed on the page, not raised."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyxjax.errors import DataError
from cyxjax.files import dotted, open_plain, read_plain, refuse_special
from cyxjax.observe.events import read_events
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.report.curves import Curve, CurveMaker
from cyxjax.run_folder import RunFolder

_WHOLE_BYTES = 8 << 20  # a metrics file up to this size is read whole
_PIECES, _PIECE_BYTES = 256, 1 << 15  # of a longer one: so many pieces, evenly spaced


@dataclass(frozen=True)
class Audit:
    """What `cyxjax audit` says of a run. `good` None: it was not asked, `lines` say why."""

    good: bool | None
    lines: list[str]


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run, as far as its folder holds them."""

    name: str
    folder: str
    history: DistributedTrainingHistory | None = None
    curves: dict[str, Curve] = field(default_factory=dict)  # loss, train_loss, val_loss, learning_rate, ...
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # of goodput.json: where the time went
    config: dict[str, str] = field(default_factory=dict)  # by dotted key
    defaults: dict[str, str] = field(default_factory=dict)
    audit: Audit = Audit(None, [])
    notes: list[str] = field(default_factory=list)  # what could not be read, or was left out

    def last(self, event: str) -> dict[str, Any]:
        """The newest event of this name; {} if there is none."""
        return next((e for e in reversed(self.events) if e["event"] == event), {})

    @property
    def changed(self) -> dict[str, str]:
        """Configuration that is not the default."""
        return {key: text for key, text in self.config.items() if self.defaults.get(key, text) != text}


def read_facts(
    folder: RunFolder,
    config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    audit: Audit | None = None,
) -> RunFacts:
    """What there is to say of the run in `folder`; config and defaults: plain values, as YAML holds them."""
    notes: list[str] = []
    history = _try(notes, folder.history, DistributedTrainingHistory.load)
    goodput = _try(notes, folder.goodput, lambda path: json.loads(read_plain(path)))
    maker = CurveMaker()
    _try(notes, folder.metrics, lambda path: _feed(maker, path, notes))
    curves = maker.curves()
    if history is not None:
        curves = _of_history(history) | curves
    return RunFacts(
        name=folder.root.absolute().name,
        folder=str(folder.root),
        history=history,
        curves=curves,
        events=read_events(folder.events),
        seconds=_numbers(goodput.get("seconds") if isinstance(goodput, dict) else None),
        config=flat(config or {}),
        defaults=flat(defaults or {}),
        audit=audit or Audit(None, []),
        notes=notes,
    )


def flat(values: Any) -> dict[str, str]:
    """Nested values as text by dotted key; nothing of what is no mapping."""
    found = dotted(values) if isinstance(values, Mapping) else ()
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in found}


def number(value: Any) -> float | None:
    """`value` as a float, text such as "nan" too; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def whole(value: Any, default: int) -> int:
    """`value` as a whole number; `default` for what is none, NaN and infinities too."""
    found = number(value)
    return default if found is None or not math.isfinite(found) else int(found)


def _try(notes: list[str], path: Path, read: Callable[[Path], Any]) -> Any:
    """What `read(path)` gives; None, and a note, where the file is missing or not what it should be."""
    try:
        return read(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is not there")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, DataError) as err:
        missing = not os.path.lexists(path)
        notes.append(f"{path.name} is not there" if missing else f"{path.name} cannot be read: {err}")
    return None


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    found = {str(name): number(value) for name, value in values.items()}
    return {name: x for name, x in found.items() if x is not None and math.isfinite(x) and x >= 0}


def _feed(maker: CurveMaker, path: Path, notes: list[str]) -> None:
    for line in _lines(path, notes):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a crash, or cut where a piece begins
        if isinstance(record, dict) and record.get("kind") != "goodput":  # that one is of the whole run
            maker.add({key: x for key, value in record.items() if (x := number(value)) is not None})


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """The lines of `path`; of a huge file, those of evenly spaced pieces, first and last included."""
    refuse_special(path)
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        yield from read_plain(path).splitlines()
        return
    notes.append(f"{path.name} is {size / 1e6:.0f} MB: curves by step are drawn from a sample of its lines")
    with open_plain(path, "rb") as file:
        for piece in range(_PIECES):
            file.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
            lines = file.read(_PIECE_BYTES).splitlines()
            yield from lines[piece > 0 :]


def _of_history(history: DistributedTrainingHistory) -> dict[str, Curve]:
    """Curves by epoch, placed at the steps where epochs ended, as far as they are known."""
    num_epochs = max(history.epochs, default=-1) + 1
    steps = history.num_steps / num_epochs if num_epochs else 0.0
    maker = CurveMaker()
    for row in history.rows():
        known = {
            k: v for k, v in row.items() if not (k.endswith("_accuracy") and math.isnan(v))
        }  # it has none
        maker.add({"step": (row["epoch"] + 1) * steps, **known})
    return maker.curves()
