"""Builds HTML. Every text from a file or a user is escaped by `text` before it reaches the page."""

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from cyxjax.files import redact

_LONGEST = 2000  # characters of one text from outside
SORTABLE = 48  # columns by which a table can be sorted
CHOICES = 3


def text(value: object) -> str:
    """`value` so that a browser shows it and runs nothing: escaped, without control characters or secrets."""
    raw = str(value)
    raw = raw if len(raw) <= _LONGEST else raw[:_LONGEST] + " ..."
    shown = "".join(
        c if c.isprintable() else " " if c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in raw
    )
    return html.escape(redact(shown), quote=True)


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], style: str = "", of_rows: Iterable[str] = ()
) -> str:
    """A table, wide ones scrolling by themselves; cells are text or `Markup`. of_rows: the CSS of each."""
    top = "".join(f"<th>{_cell(name)}</th>" for name in head)
    body = "".join(
        f'<tr style="{css}">' + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>"
        for row, css in zip(rows, chain(of_rows, repeat("")), strict=False)
    )
    return (
        f'<div class="wide"><table class="{style}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def sortable(columns: Mapping[str, Sequence[tuple[object, Any]]]) -> str:
    """A table that the reader sorts by one of its first `SORTABLE` columns, without a script.

    Of each cell what it shows and what it is sorted by. At first rows have the order that they come in.
    """
    switches = "".join(f'<input type="radio" name="sort" id="sort-{i}">' for i in range(len(columns)))
    head = [Markup(f'<label for="sort-{i}">{text(name)}</label>') for i, name in enumerate(columns)]
    orders = [sorted(key for _, key in cells) for cells in columns.values()]
    rows = list(zip(*columns.values(), strict=True))
    places = ["".join(f"--o{i}:{orders[i].index(key)};" for i, (_, key) in enumerate(row)) for row in rows]
    shown = table(head, [[cell for cell, _ in row] for row in rows], "numbers", places)
    return f'<div class="sort" style="--n:{len(columns)}">{switches}{shown}</div>'


def choice(label: str, parts: Mapping[str, str]) -> str:
    """At most `CHOICES` parts of which the reader chooses one, at first the first; without a script."""
    if len(parts) < 2:
        return "".join(parts.values())
    switches, shown = "", ""
    for i, (name, inside) in enumerate(parts.items()):
        switches += f'<input type="radio" name="choice" id="choice-{i}"{" checked" * (not i)}>'
        switches += f'<label for="choice-{i}">{text(name)}</label>'
        shown += f'<div class="choice-{i}">{inside}</div>'
    return f'<div class="choice"><span>{text(label)}</span>{switches}{shown}</div>'


class Markup(str):
    """HTML that was made here."""


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else text(value)


def section(title: str, *parts: str, name: str = "") -> str:
    """A part of the page under its heading; nothing if there is nothing in it."""
    inside = "".join(part for part in parts if part)
    return f'<section id="{name}"><h2>{text(title)}</h2>{inside}</section>' if inside else ""


def more(summary: str, inside: str) -> str:
    """What is folded until the reader asks; open in print."""
    return f"<details><summary>{text(summary)}</summary>{inside}</details>" if inside else ""


def said(line: str, style: str = "note") -> str:
    return f'<p class="{style}">{text(line)}</p>'
