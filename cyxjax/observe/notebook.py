"""Output in notebooks: one progress line that is replaced, and a history as a table with curves."""

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cyxjax.observe.console import PlainConsole
from cyxjax.observe.records import Record

_EVERY_S = 0.5  # between two updates of the line of progress
_MOST_ROWS = 12
_WIDTH, _HEIGHT = 360, 120
_COLOURS = {"train": "#1f77b4", "val": "#ff7f0e"}


class NotebookConsole(PlainConsole):
    """Lines as in a log, but for progress within an epoch: its line is replaced, and is gone at the end."""

    def __init__(self) -> None:
        super().__init__(every_s=_EVERY_S)
        self._handle: Any = None

    def begin(self, total_steps: int | None, epochs: int | None = None) -> None:
        from IPython.display import display

        super().begin(total_steps, epochs)
        self._handle = display({"text/plain": "starting"}, raw=True, display_id=True)

    def end(self) -> None:
        self._show("")

    def step(self, record: Record) -> None:
        text = self.due_step_line(record, time.monotonic())
        if text is not None:
            self._show(text)

    def _show(self, text: str) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)


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
