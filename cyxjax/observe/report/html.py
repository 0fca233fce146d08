"""Text as HTML. Everything that comes from a file or a user goes through `text` on its way to the page."""

import html
from collections.abc import Iterable, Sequence

from cyxjax.files import redact

_LONGEST = 2000  # characters of one text from outside


def text(value: object) -> str:
    """`value` so that a browser shows it and runs nothing: escaped, without control characters or secrets."""
    raw = str(value)
    raw = raw if len(raw) <= _LONGEST else raw[:_LONGEST] + " ..."
    shown = "".join(
        c if c.isprintable() else " " if c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in raw
    )
    return html.escape(redact(shown), quote=True)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], style: str = "") -> str:
    """A table, wide ones scrolling by themselves; cells are text, or `Markup` as it is."""
    top = "".join(f"<th>{_cell(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="{style}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


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
