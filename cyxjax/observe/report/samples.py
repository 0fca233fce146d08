"""Test samples as the model sees them, from the newest `samples` event: pictures with captions, texts."""

import base64
import binascii
from typing import Any

from cyxjax.observe.records import is_png
from cyxjax.observe.report.facts import RunFacts
from cyxjax.observe.report.html import said, table, text

_MOST, _MOST_BYTES = 64, 1 << 18  # of pictures, and of one


def shown(run: RunFacts) -> str:
    """The pictures or texts; "" where there are none."""
    event = run.last("samples")
    note = said(str(event["note"])) if "note" in event else ""
    images, texts = _dicts(event.get("images")), _dicts(event.get("texts"))
    drawn = "".join(map(_picture, images))
    if not drawn and not texts:
        return ""
    return note + (f'<div class="samples">{drawn}</div>' if drawn else "") + _texts(texts)


def _picture(item: dict[str, Any]) -> str:
    """Decoded and encoded again: the file is not trusted."""
    try:
        raw = base64.b64decode(str(item.get("png", "")), validate=True)
    except (binascii.Error, ValueError):
        return ""
    if not is_png(raw) or len(raw) > _MOST_BYTES:
        return ""
    caption = text(item.get("caption", ""))
    style = "" if item.get("right", True) else ' class="bad"'
    source = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    return (
        f'<figure><img alt="{caption or "sample"}" src="{source}">'
        f"<figcaption{style}>{caption}</figcaption></figure>"
    )


def _texts(items: list[dict[str, Any]]) -> str:
    if not items:
        return ""
    names = ("prompt", "continued", "stood there")
    head = ("given", "the model went on", "what stood there")
    return table(head, ([item.get(name, "") for name in names] for item in items), "texts")


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [item for item in found[:_MOST] if isinstance(item, dict)] if isinstance(found, list) else []
