"""The confusion matrix: its counts, and their table on the page."""

from typing import Any

import numpy as np

from cyxjax.observe.report.facts import RunFacts
from cyxjax.observe.report.html import Markup, said, table, text

MOST_CLASSES = 50  # a matrix of more is no picture


def confusion_matrix(scores: np.ndarray, labels: np.ndarray, num_classes: int) -> list[list[int]]:
    """counts[label][class that was predicted]; scores (N, num_classes), labels (N,) integers."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (labels, np.argmax(scores, -1)), 1)
    return counts.tolist()


def shown(run: RunFacts) -> str:
    """The matrix and a row for each class: of the newest `predictions` event, else of a metric."""
    event = run.last("predictions")
    counts, names, where = _counts(event.get("confusion")), event.get("classes"), "test samples"
    if counts is None:
        counts, where = _measured(run)
    if counts is None:
        return ""
    size = len(counts)
    named = isinstance(names, list) and len(names) == size
    labels = [str(name) for name in names] if named and names else [str(i) for i in range(size)]
    right, total = int(np.trace(counts)), int(counts.sum())
    return (
        said(
            f"{total:,} {where}, {right:,} right ({right / max(total, 1):.1%}). Rows: what it was; "
            "columns: what was predicted."
        )
        + _heat(counts, labels)
        + table(("class", "samples", "recall", "precision", "F1"), _by_class(counts, labels), "numbers")
    )


def _measured(run: RunFacts) -> tuple[np.ndarray | None, str]:
    """The newest square matrix among the metrics of the history, of validation if there is one."""
    metrics = run.history.metrics if run.history else {}
    for name in sorted(metrics, key=lambda name: not name.startswith("val_")):
        values = metrics[name]
        counts = _counts(values[-1]) if isinstance(values, list) and values else None
        if counts is not None and len(counts) > 1:
            part = "validation" if name.startswith("val_") else "training"
            return counts, f"{part} samples of the last epoch ({name})"
    return None, ""


def _counts(raw: Any) -> np.ndarray | None:
    try:
        counts = np.asarray(raw, np.float64)
    except (TypeError, ValueError):
        return None
    square = counts.ndim == 2 and counts.shape[0] == counts.shape[1] and 0 < counts.shape[0] <= MOST_CLASSES
    return counts if square and np.isfinite(counts).all() and (counts >= 0).all() else None


def _heat(counts: np.ndarray, labels: list[str]) -> str:
    rows = []
    for i, label in enumerate(labels):
        whole = max(counts[i].sum(), 1)
        cells = [
            Markup(
                f'<i class="c{0 if i == j else 1}" style="--share:{60 * n / whole:.0f}%">{n:.0f}</i>'
                if n
                else ""
            )
            for j, n in enumerate(counts[i])
        ]
        rows.append((Markup(f"<b>{text(label)}</b>"), *cells))
    return table(("", *labels), rows, "heat")


def _by_class(counts: np.ndarray, labels: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for i, label in enumerate(labels):
        hit, was, said_so = counts[i, i], counts[i].sum(), counts[:, i].sum()
        recall, precision = hit / was if was else np.nan, hit / said_so if said_so else np.nan
        f1 = 2 * hit / (was + said_so) if was + said_so else np.nan
        rates = ("-" if np.isnan(rate) else f"{rate:.3f}" for rate in (recall, precision, f1))
        rows.append((label, f"{was:,.0f}", *rates))
    return rows
