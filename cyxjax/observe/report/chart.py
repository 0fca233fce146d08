"""Plots as SVG, in the page's own colours: `line_chart`, and `bar`, one bar of several parts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cyxjax.observe.report.curves import Point, powers, short, smoothed, thinned, ticks
from cyxjax.observe.report.html import text

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 14, 44
_SMOOTH_FROM = 40  # points: fewer are drawn as they are
_LOG_FROM = 50.0  # a quantity that spans more than this is drawn by powers of ten
NUM_COLOURS = 10
_MOST_COLUMNS = 60  # of values under the pointer


@dataclass(frozen=True)
class Line:
    """One curve of a plot. colour: 0 to 7, the page's."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False
    smooth: bool = True
    broken: Sequence[float] = ()  # steps without a finite value


@dataclass(frozen=True)
class Mark:
    """An event of the run at a step."""

    step: float
    kind: str  # resume, restart, rollback, save
    label: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    may_log: bool = False,
    axis: str = "step",
) -> str:
    """A figure with its legend; "" where no line has a point. may_log: by powers of ten, if it spans many.
    axis: what x counts."""
    lines = [line for line in lines if line.points or line.broken]
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    area = _Area.around(points, may_log)
    drawn = [_grid(area, axis), *(_line(area, line, axis) for line in lines), _values(area, lines, axis)]
    drawn += [_mark(area, mark) for mark in marks]  # last: what lies on top shows its title
    legend = "".join(_key(line) for line in lines)
    last = "; ".join(f"{line.label}: last {short(line.points[-1][1])}" for line in lines if line.points)
    scale, caption = " (log scale)" if area.log else "", text(f"{title} by {axis}. {last}")
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{caption}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption><b>{text(title)}</b>{scale} {legend}</figcaption>{svg}</figure>"


def bar(parts: Mapping[str, float], unit: str = "s") -> str:
    """One bar cut by share, with a legend that says each part in numbers. Parts take their colours in order;
    one of size 0 takes its colour too, and is not drawn."""
    total = sum(parts.values())
    if not total > 0:
        return ""
    at, pieces, keys = 0.0, [], []
    for index, (name, size) in enumerate(parts.items()):
        width = 1000 * size / total
        if not size:
            continue
        said = f"{name}: {size:,.1f} {unit}, {size / total:.1%}"
        colour = f"c{index % NUM_COLOURS}"
        pieces.append(
            f'<rect class="{colour} fill" x="{at:.1f}" y="0" width="{width:.1f}" height="40">'
            f"<title>{text(said)}</title></rect>"
        )
        keys.append(f'<li><i class="{colour} swatch"></i>{text(said)}</li>')
        at += width
    return (
        '<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img" '
        f'aria-label="{text("; ".join(f"{n} {s:.1f} {unit}" for n, s in parts.items()))}">{"".join(pieces)}'
        f'</svg><ul class="keys">{"".join(keys)}</ul>'
    )


@dataclass(frozen=True)
class _Area:
    """Where values lie on the paper."""

    left: float
    right: float
    low: float
    high: float
    log: bool

    @staticmethod
    def around(points: Sequence[Point], may_log: bool) -> "_Area":
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = min(ys), max(ys)
        log = may_log and low > 0 and high / low > _LOG_FROM
        if log:
            low, high = low / 1.2, high * 1.2
        elif high == low:
            low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
        else:
            low, high = low - (high - low) * 0.05, high + (high - low) * 0.05
        left, right = min(min(xs), 0.0), max(xs)
        return _Area(left, right if right > left else left + 1, low, high, log)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return _HEIGHT - _BOTTOM - (at - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(area: _Area, axis: str) -> str:
    levels = powers(area.low, area.high) if area.log else ticks(area.low, area.high)
    if len(levels) < 2:
        levels = [area.low, area.high]
    parts = []
    for level in levels:
        y = area.y(level)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 8}" y="{y:.1f}" dy=".35em" text-anchor="end">{short(level)}</text>'
        )
    places = ticks(area.left, area.right, 4)
    for place in places:
        x = area.x(place)
        anchor = "end" if x > _WIDTH - 60 else "middle"
        parts.append(
            f'<path class="grid" d="M{x:.1f} {_HEIGHT - _BOTTOM}v5"/>'
            f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{short(place)}</text>'
        )
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    return "".join(parts) + f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{axis}</text>'


def _line(area: _Area, line: Line, axis: str) -> str:
    points, style = thinned(line.points), f"c{line.colour % NUM_COLOURS} line{' dashed' * line.dashed}"
    smooth = line.smooth and len(line.points) >= _SMOOTH_FROM
    drawn = [_path(area, points, style + " faint" * smooth)]
    if smooth:
        drawn.append(_path(area, thinned(smoothed(line.points)), style))
    if len(points) == 1:
        (x, y) = points[0]
        drawn.append(f'<circle class="{style} dot" cx="{area.x(x):.1f}" cy="{area.y(y):.1f}" r="3.5"/>')
    for step in line.broken[:100]:
        x = area.x(min(max(step, area.left), area.right))
        drawn.append(
            f'<text class="bad" x="{x:.1f}" y="{_TOP + 10}" text-anchor="middle">&#10005;'
            f"<title>{text(line.label)}: not finite at {axis} {short(step)}</title></text>"
        )
    return "".join(drawn)


def _path(area: _Area, points: Sequence[Point], style: str) -> str:
    if not points:
        return ""
    places = " ".join(f"{area.x(x):.1f},{area.y(y):.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{places}"/>'


def _values(area: _Area, lines: Sequence[Line], axis: str) -> str:
    """Columns that cover the plot, each with the values of its place as a title: shown under the pointer."""
    steps = sorted({x for line in lines for x, _ in line.points})
    steps = steps[:: -(-len(steps) // _MOST_COLUMNS)] if steps else []
    edges = [
        _LEFT,
        *((area.x(one) + area.x(next_one)) / 2 for one, next_one in pairwise(steps)),
        _WIDTH - _RIGHT,
    ]
    columns = []
    for step, (left, right) in zip(steps, pairwise(edges), strict=False):
        near = {line.label: min(line.points, key=lambda p: abs(p[0] - step)) for line in lines if line.points}
        values = ", ".join(f"{label} {short(value)}" for label, (_, value) in near.items())
        title = text(f"{axis} {short(step)}: {values}")
        columns.append(
            f'<rect class="values" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{title}</title></rect>'
        )
    return "".join(columns)


def _mark(area: _Area, mark: Mark) -> str:
    if not area.left <= mark.step <= area.right:
        return ""
    x, foot = area.x(mark.step), _HEIGHT - _BOTTOM
    path = f"M{x:.1f} {foot}v-7" if mark.kind == "save" else f"M{x:.1f} {_TOP}V{foot}"
    return f'<path class="mark {mark.kind}" d="{path}"><title>{text(mark.label)}</title></path>'


def _key(line: Line) -> str:
    style = f"c{line.colour % NUM_COLOURS} swatch{' dashed' * line.dashed}"
    return f'<span class="key"><i class="{style}"></i>{text(line.label)}</span>'
