"""Plots as SVG, in the page's own colours: `line_chart`, and `bar`, one bar of several parts."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cyxjax.observe.report.facts import Point
from cyxjax.observe.report.html import text

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 14, 44
_SMOOTH_FROM = 40  # points: fewer are not smoothed
_LOG_FROM = 50.0  # a quantity with a larger ratio of values gets a log scale
NUM_COLOURS = 10
_MOST_COLUMNS = 60  # columns that show values under the pointer
_MOST_POINTS = 400  # about the width of a plot in pixels


@dataclass(frozen=True)
class Line:
    """One curve of a plot. colour: 0 to 9, an index of the page's colours."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False
    smooth: bool = True


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
    """A figure with its legend; "" if no line has a point. may_log: use a log scale for a large range.
    axis: the unit of x."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    area = _Area.around([point for line in lines for point in line.points], may_log)
    drawn = [_grid(area, axis), *(_line(area, line) for line in lines), _values(area, lines, axis)]
    drawn += [_mark(area, mark) for mark in marks]  # last: the element on top shows its title
    legend = "".join(_key(line) for line in lines)
    last = "; ".join(f"{line.label}: last {short(line.points[-1][1])}" for line in lines)
    scale, caption = " (log scale)" if area.log else "", text(f"{title} by {axis}. {last}")
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{caption}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption><b>{text(title)}</b>{scale} {legend}</figcaption>{svg}</figure>"


def bar(seconds: Mapping[str, float]) -> str:
    """One bar divided by share, with a legend that shows the seconds of each part. Parts get colours in
    order; a part of 0 seconds is not drawn, but also uses up a colour."""
    total = sum(seconds.values())
    at, pieces, keys = 0.0, "", ""
    for index, (name, size) in enumerate(seconds.items()):
        if not size:
            continue
        width, label = 1000 * size / total, text(f"{name}: {size:,.1f} s, {size / total:.1%}")
        colour = f"c{index % NUM_COLOURS}"
        pieces += f'<rect class="{colour} fill" x="{at:.1f}" y="0" width="{width:.1f}" height="40">'
        pieces += f"<title>{label}</title></rect>"
        keys += f'<li><i class="{colour} swatch"></i>{label}</li>'
        at += width
    svg = f'<svg class="bar" viewBox="0 0 1000 40" preserveAspectRatio="none" role="img">{pieces}</svg>'
    return f'{svg}<ul class="keys">{keys}</ul>' if keys else ""


@dataclass(frozen=True)
class _Area:
    """Maps values to positions in the plot."""

    left: float
    right: float
    low: float
    high: float
    log: bool

    @staticmethod
    def around(points: Sequence[Point], may_log: bool) -> "_Area":
        xs, ys = zip(*points, strict=True)
        low, high = min(ys), max(ys)
        left, right = min(*xs, 0.0), max(xs)
        right = right if right > left else left + 1
        if may_log and low > 0 and high / low > _LOG_FROM:
            return _Area(left, right, low / 1.2, high * 1.2, True)
        room = 0.05 * (high - low) or 0.1 * (abs(high) or 1)
        return _Area(left, right, low - room, high + room, False)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return _HEIGHT - _BOTTOM - (at - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(area: _Area, axis: str) -> str:
    levels = powers(area.low, area.high) if area.log else ticks(area.low, area.high)
    drawn = ""
    for level in levels if len(levels) > 1 else (area.low, area.high):
        y = area.y(level)
        drawn += f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        drawn += f'<text x="{_LEFT - 8}" y="{y:.1f}" dy=".35em" text-anchor="end">{short(level)}</text>'
    for place in ticks(area.left, area.right, 4):
        x = area.x(place)
        anchor = "end" if x > _WIDTH - 60 else "middle"
        drawn += f'<path class="grid" d="M{x:.1f} {_HEIGHT - _BOTTOM}v5"/>'
        drawn += f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{short(place)}</text>'
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    return drawn + f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{axis}</text>'


def _line(area: _Area, line: Line) -> str:
    style = f"c{line.colour % NUM_COLOURS} line{' dashed' * line.dashed}"
    if len(line.points) == 1:
        ((x, y),) = line.points
        return f'<circle class="{style} dot" cx="{area.x(x):.1f}" cy="{area.y(y):.1f}" r="3.5"/>'
    if not line.smooth or len(line.points) < _SMOOTH_FROM:
        return _path(area, line.points, style)
    return _path(area, line.points, style + " faint") + _path(area, smoothed(line.points), style)


def _path(area: _Area, points: Sequence[Point], style: str) -> str:
    places = " ".join(f"{area.x(x):.1f},{area.y(y):.1f}" for x, y in thinned(points))
    return f'<polyline class="{style}" points="{places}"/>'


def _values(area: _Area, lines: Sequence[Line], axis: str) -> str:
    """Columns that cover the plot; the title of each, shown under the pointer, has its values."""
    steps = sorted({x for line in lines for x, _ in line.points})
    steps = steps[:: -(-len(steps) // _MOST_COLUMNS)]
    middles = ((area.x(one) + area.x(next_one)) / 2 for one, next_one in pairwise(steps))
    columns = ""
    for step, (left, right) in zip(steps, pairwise([_LEFT, *middles, _WIDTH - _RIGHT]), strict=True):
        near = [f"{line.label} {short(_nearest(line.points, step)[1])}" for line in lines]
        title = text(f"{axis} {short(step)}: {', '.join(near)}")
        columns += f'<rect class="values" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
        columns += f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{title}</title></rect>'
    return columns


def _nearest(points: Sequence[Point], step: float) -> Point:
    """The point at the place nearest to `step`. points: in the order of their places."""
    after = bisect_left(points, step, key=lambda point: point[0])
    return min(points[max(0, after - 1) : after + 1], key=lambda point: abs(point[0] - step))


def _mark(area: _Area, mark: Mark) -> str:
    if not area.left <= mark.step <= area.right:
        return ""
    x, foot = area.x(mark.step), _HEIGHT - _BOTTOM
    path = f"M{x:.1f} {foot}v-7" if mark.kind == "save" else f"M{x:.1f} {_TOP}V{foot}"
    return f'<path class="mark {mark.kind}" d="{path}"><title>{text(mark.label)}</title></path>'


def _key(line: Line) -> str:
    style = f"c{line.colour % NUM_COLOURS} swatch{' dashed' * line.dashed}"
    return f'<span class="key"><i class="{style}"></i>{text(line.label)}</span>'


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points: both ends, and the lowest and highest of each interval, to keep all spikes."""
    if len(points) <= most:
        return list(points)
    count = most // 2 - 1
    kept = {points[0], points[-1]}
    for first, stop in pairwise(len(points) * i // count for i in range(count + 1)):
        kept |= {pick(points[first:stop], key=lambda p: p[1]) for pick in (min, max)}
    return sorted(kept)


def smoothed(points: Sequence[Point], span: float = 0.04) -> list[Point]:
    """An exponential running mean over about the fraction `span` of the points, with bias correction.

    Source: the bias-corrected exponential average, Kingma and Ba 2015, arXiv:1412.6980, section 3.
    """
    keep = 1 - 1 / max(len(points) * span, 1.0)
    mean, weight, out = 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high], at most `most` + 1 of them, evenly spaced; low < high."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of ten inside [low, high], at most `most`: ticks of a logarithmic axis; 0 < low."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**n for n in range(first, last + 1, max(1, -(-(last - first + 1) // most)))]


def short(value: float) -> str:
    """A number in few characters: `1,797`, `0.0955`, `3.42e-08`, `250,000`."""
    is_large = 1000 <= abs(value) < 1e8
    return f"{value:,.0f}" if is_large else f"{value:.4g}"
