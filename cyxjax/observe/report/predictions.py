"""The predictions for test samples: the confusion matrix, and samples as pictures or texts."""

import html
import struct
import zlib
from typing import Any

import numpy as np

from cyxjax.observe.report.facts import RunFacts
from cyxjax.observe.report.html import Markup, paragraph, table, text

MOST_CLASSES = 50  # a larger matrix is not readable
_MOST = 64  # pictures


def confusion_matrix(scores: np.ndarray, labels: np.ndarray, num_classes: int) -> list[list[int]]:
    """counts[label][class that was predicted]; scores (N, num_classes), labels (N,) integers."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (labels, np.argmax(scores, -1)), 1)
    return counts.tolist()


def pictures(values: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, 3) of (N, H, W, 1 or 3): the lowest value is black, the highest white.

    Images of more than 96 pixels per side are reduced to every second, third, ... pixel.
    """
    every = -(-max(values.shape[1:3]) // 96)
    floats = np.nan_to_num(np.asarray(values[:, ::every, ::every], np.float32))
    low, high = float(floats.min()), float(floats.max())
    scaled = np.rint(255 * (floats - low) / max(high - low, 1e-12)).astype(np.uint8)
    return np.repeat(scaled, 3, -1) if scaled.shape[-1] == 1 else scaled


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of uint8 (H, W, 3). Source: PNG specification, sections 9 (filter 0) and 11.2."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n"
    for part in (b"IHDR" + head, b"IDAT" + zlib.compress(rows.tobytes(), 9), b"IEND"):
        raw += struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
    return raw


def matrix(run: RunFacts) -> str:
    """The matrix of the newest `predictions` event and a row for each class; "" without one."""
    event = run.last("predictions")
    counts = _counts(event.get("confusion"))
    names: Any = event.get("classes")
    if counts is None:
        return ""
    named = isinstance(names, list) and len(names) == len(counts)
    labels = [str(name) for name in (names if named else range(len(counts)))]
    right, total = np.trace(counts), counts.sum()
    share = right / max(total, 1)
    return (
        paragraph(f"{total:,.0f} test samples, {right:,.0f} correct ({share:.1%}).")
        + paragraph("Rows: true class; columns: predicted class.")
        + _heat(counts, labels)
        + table(("class", "samples", "recall", "precision", "F1"), _rates(counts, labels), "numbers")
    )


def _counts(raw: Any) -> np.ndarray | None:
    try:
        counts = np.asarray(raw, np.float64)
    except (TypeError, ValueError):
        return None
    square = counts.ndim == 2 and counts.shape[0] == counts.shape[1] and 0 < counts.shape[0] <= MOST_CLASSES
    return counts if square and np.isfinite(counts).all() and (counts >= 0).all() else None


def _heat(counts: np.ndarray, labels: list[str]) -> str:
    shares = 60 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    rows = []
    for i, label in enumerate(labels):
        cells = [
            Markup(f'<i class="c{int(i != j)}" style="--share:{shares[i, j]:.0f}%">{n:.0f}</i>' if n else "")
            for j, n in enumerate(counts[i])
        ]
        rows.append((Markup(f"<b>{text(label)}</b>"), *cells))
    return table(("", *labels), rows, "heat")


def _rates(counts: np.ndarray, labels: list[str]) -> list[tuple[str, ...]]:
    hits, was, predicted = np.diag(counts), counts.sum(1), counts.sum(0)
    with np.errstate(invalid="ignore"):  # for a class without samples, or never predicted
        rates = np.stack([hits / was, hits / predicted, 2 * hits / (was + predicted)], 1)
    return [
        (label, f"{count:,.0f}", *("-" if np.isnan(x) else f"{x:.3f}" for x in row))
        for label, count, row in zip(labels, was, rates, strict=True)
    ]


def samples(run: RunFacts) -> str:
    """The pictures or texts of the newest `samples` event; "" if there are none."""
    event = run.last("samples")
    note = paragraph(str(event["note"])) if "note" in event else ""
    images, texts = _dicts(event.get("images")), _dicts(event.get("texts"))
    drawn = "".join(map(_picture, images))
    if not drawn and not texts:
        return ""
    return note + (f'<div class="samples">{drawn}</div>' if drawn else "") + _texts(texts)


def _picture(item: dict[str, Any]) -> str:
    caption, right = text(item.get("caption", "")), item.get("right", True)
    source = f"data:image/png;base64,{html.escape(str(item.get('png', '')))}"
    return (
        f'<figure><img alt="{caption or "sample"}" src="{source}">'
        f'<figcaption class="{"" if right else "bad"}">{caption}</figcaption></figure>'
    )


def _texts(items: list[dict[str, Any]]) -> str:
    if not items:
        return ""
    names = ("prompt", "continued", "stood there")
    head = ("prompt", "continuation by the model", "original continuation")
    return table(head, ([item.get(name, "") for name in names] for item in items), "texts")


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [item for item in found[:_MOST] if isinstance(item, dict)] if isinstance(found, list) else []
