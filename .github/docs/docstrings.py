"""Docstrings as Markdown: a line that begins with `Raises:` and the like is a paragraph of its own."""

import re
from typing import Any

import griffe

_PART = re.compile(r"^(Raises|Returns|Source|State|Shapes|Shape|Yields):", re.MULTILINE)


class Paragraphs(griffe.Extension):
    """Sets the parts of each docstring apart, as `docstring_style: null` would run them together."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _PART.sub(r"\n**\1:**", obj.docstring.value)
