"""Curves over steps, thinned for drawing: pure functions, and a class that collects records."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Point = tuple[float, float]
_NOT_CURVES = {"step", "epoch", "batch"}
_MOST_NAMES = 64  # of curves: more is a mistake, or a page nobody reads
_LARGEST = 1e300  # a value beyond counts as not finite: differences of such overflow
EPOCHS, SECONDS = "epochs", "total_time_seconds"  # curves that say what step is where on another axis
_MOST_POINTS = 400  # a plot is about so many pixels wide


class Curve(NamedTuple):
    """One quantity over optimizer steps, in order of steps."""

    points: list[Point]  # values finite
    broken: list[float] = []  # steps at which the value was not finite; never changed

    @property
    def values(self) -> list[float]:
        return [y for _, y in self.points]

    def moved(self, place: "Place") -> "Curve":
        """The same values, each where `place` puts its step."""
        points = [(place(step), value) for step, value in self.points]
        return Curve([p for p in points if abs(p[0]) < _LARGEST], [place(step) for step in self.broken])


Place = Callable[[float], float]
"""step -> where it lies on an axis"""


def place_of(scale: Curve) -> Place:
    """Steps to `scale`'s values: from 0 at step 0, straight between its points and beyond the last."""
    steps, values = zip((0.0, 0.0), *((step, value) for step, value in scale.points if step > 0), strict=True)
    rate = (values[-1] - values[-2]) / (steps[-1] - steps[-2]) if len(steps) > 1 else 0.0

    def place(step: float) -> float:
        step = float(min(step, _LARGEST))
        return float(np.interp(step, steps, values)) + max(step - steps[-1], 0.0) * rate

    return place


class CurveMaker:
    """Gathers records, `{"step": 120, "loss": 0.3}`, into a curve for each key."""

    def __init__(self) -> None:
        self._found: dict[str, dict[float, float]] = {}

    def add(self, record: Mapping[str, float]) -> None:
        """Of two records of one step the later counts: a resumed run made the step again."""
        step = record.get("step")
        if step is None or not math.isfinite(step):
            return
        if "train_loss" in record and "epoch" in record:  # of a whole epoch; they count from 0
            self._found.setdefault(EPOCHS, {})[step] = record["epoch"] + 1
        for name in record.keys() - _NOT_CURVES:
            if name in self._found or len(self._found) < _MOST_NAMES:
                self._found.setdefault(name, {})[step] = record[name]

    def curves(self) -> dict[str, Curve]:
        return {name: _curve(by_step) for name, by_step in sorted(self._found.items())}


def _curve(by_step: Mapping[float, float]) -> Curve:
    places = sorted(by_step)
    good = [(step, by_step[step]) for step in places if abs(by_step[step]) < _LARGEST]
    return Curve(good, [step for step in places if not abs(by_step[step]) < _LARGEST])


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points, with the ends, and the lowest and highest of each stretch: no spike is lost."""
    if len(points) <= most:
        return list(points)
    count = most // 2 - 1
    edges = [1 + (len(points) - 2) * i // count for i in range(count + 1)]
    kept = [points[0]]
    for first, stop in pairwise(edges):
        part = points[first:stop]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])} if part else set()
        kept += sorted(ends)
    return [*kept, points[-1]]


def smoothed(points: Sequence[Point], span: float = 0.04) -> list[Point]:
    """A running mean that forgets over a part `span` of the points; without the pull of its start.

    Source: the bias-corrected exponential average, Kingma and Ba 2015, arXiv:1412.6980, section 3.
    """
    keep = 1 - 1 / max(len(points) * span, 1.0)
    mean, weight, out = 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high], at most `most` + 1 of them, evenly spaced."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of ten inside [low, high], at most `most`: ticks of a logarithmic axis; 0 < low."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, -(-(last - first + 1) // most))
    return [10.0**n for n in range(first, last + 1, every)]


def short(value: float) -> str:
    """A number in few characters: `1,797`, `0.0955`, `3.4e-08`, `12.5M`."""
    size = abs(value)
    if size >= 1e15 or (value and size < 1e-4):
        return f"{value:.2g}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    return f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:.4g}"
