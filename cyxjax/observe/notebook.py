"""A history in notebooks: a table with curves."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_MOST_ROWS = 12
_WIDTH, _HEIGHT = 360, 120
_COLOURS = {"train": "#1f77b4", "val": "#ff7f0e"}


def history_html(rows: Sequence[Mapping[str, float]], title: str) -> str:
    """The epochs as a table, the first and the last ones of many, above the curves of the losses."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "epoch"]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in ("epoch", *names))
    half = _MOST_ROWS // 2
    shown = rows if len(rows) <= _MOST_ROWS else [*rows[:half], {}, *rows[-half:]]
    body = "".join(f"<tr>{_row(row, names)}</tr>" for row in shown)
    return (
        f"<div><b>{escape(title)}</b>{_curves(rows)}<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(row: Mapping[str, float], names: Sequence[str]) -> str:
    if not row:
        return f'<td colspan="{len(names) + 1}" style="text-align:center">&hellip;</td>'
    values = "".join(f"<td>{row[name]:.4g}</td>" if name in row else "<td></td>" for name in names)
    return f"<td>{row['epoch'] + 1:.0f}</td>{values}"


def _curves(rows: Sequence[Mapping[str, float]]) -> str:
    """An SVG of the losses over epochs; "" where there is no curve to draw."""
    lines = {
        split: [
            (row["epoch"], row[f"{split}_loss"])
            for row in rows
            if math.isfinite(row.get(f"{split}_loss", math.nan))
        ]
        for split in _COLOURS
    }
    points = [point for line in lines.values() for point in line]
    if len({x for x, _ in points}) < 2:
        return ""
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    height = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        across, down = (x - left) / (right - left), (high - y) / height
        return f"{4 + across * (_WIDTH - 8):.1f},{4 + down * (_HEIGHT - 8):.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{_COLOURS[split]}" stroke-width="2" '
        f'points="{" ".join(place(*point) for point in line)}"><title>{split} loss</title></polyline>'
        for split, line in lines.items()
    )
    keys = " ".join(
        f'<span style="color:{_COLOURS[split]}">{split} loss</span>' for split, line in lines.items() if line
    )
    return (
        f'<div>{keys}</div><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="losses over epochs">{drawn}</svg>'
    )
