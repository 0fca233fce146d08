"""Outputs of a trained model for some test samples: counts by class, pictures, reconstructions, text.

They are stored as events, for the report. All ranks call this module in the same way; it never raises for a
model that trains but cannot predict.
"""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.data.text import decode
from cyxjax.observe.events import Events
from cyxjax.observe.report.predictions import MOST_CLASSES, confusion_matrix, pictures, png
from cyxjax.redaction import describe
from cyxjax.train.feeding.fit_data import is_loader

_SHOWN = 24  # pictures
_TEXTS, _NEW_TOKENS = 3, 64
Predict = Callable[[Any], Any]
Event = tuple[str, dict[str, Any]]
"""name, values"""


def log_samples(
    splits: Splits,
    most: int,
    predict: Predict,
    events: Events,
    say: Callable[[str], None],
    ignore_index: int | None = None,
) -> None:
    """Logs outputs for the first `most` test samples, if their type is supported; none of a stream.

    Samples with a label below 0 or `ignore_index` are left out, as in the metrics.
    """
    count = 0 if is_loader(splits.test) else min(len(splits.test), most)
    if not count:
        return
    inputs, targets = splits.test.take(np.arange(count))
    try:
        for event, values in _shown(splits.info, inputs, targets, predict, ignore_index):
            events.log(event, **values)
    except Exception as err:  # a model that trains but cannot predict: the same on all ranks
        say(f"WARNING: the report shows no predictions: {describe(err)}")


def _shown(
    info: DatasetInfo, inputs: Any, targets: Any, predict: Predict, ignore_index: int | None
) -> Iterator[Event]:
    if info.task == "language":
        yield from _continued(info, inputs, predict)
        return
    if info.task != "classification" or not isinstance(inputs, np.ndarray):
        return
    found = predict(inputs)
    again = found.get("reconstruction") if isinstance(found, dict) else None
    if again is not None and np.shape(again) == inputs.shape and _are_pictures(inputs):
        yield _reconstructed(inputs[:_SHOWN], np.asarray(again)[:_SHOWN])
        return
    labels = np.asarray(targets)
    counted = (labels >= 0) & (labels != ignore_index)
    fits = np.shape(found) == (len(inputs), info.num_classes) and labels.shape == (len(inputs),)
    if not fits or info.num_classes < 2 or not counted.any():
        return
    inputs, labels = inputs[counted], labels[counted].astype(np.int64)  # boolean labels count as 0 and 1
    scores = np.asarray(found, np.float64)[counted]
    if info.num_classes <= MOST_CLASSES:
        counts = confusion_matrix(scores, labels, info.num_classes)
        yield "predictions", {"confusion": counts, "classes": info.class_names}
    if _are_pictures(inputs):
        yield _classified(info, inputs, labels, scores)


def _are_pictures(inputs: np.ndarray) -> bool:
    return inputs.ndim == 4 and inputs.shape[-1] in (1, 3) and min(inputs.shape[1:3]) >= 4


def _classified(info: DatasetInfo, inputs: np.ndarray, labels: np.ndarray, scores: np.ndarray) -> Event:
    """Wrong predictions, the most confident first, then right ones."""
    chosen = scores.argmax(-1)
    wrong = np.flatnonzero(chosen != labels)
    doubt = np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)  # 1 / the largest probability
    wrong = wrong[np.argsort(doubt[wrong], kind="stable")]
    order = np.concatenate([wrong[: _SHOWN // 2], np.flatnonzero(chosen == labels)])[:_SHOWN]
    names = info.class_names or tuple(map(str, range(info.num_classes)))
    drawn = pictures(inputs[order])
    captions = [
        names[labels[i]] if chosen[i] == labels[i] else f"{names[labels[i]]}, taken for {names[chosen[i]]}"
        for i in order
    ]
    items = [
        {"png": _text(pixels), "caption": caption, "right": bool(chosen[i] == labels[i])}
        for i, pixels, caption in zip(order, drawn, captions, strict=True)
    ]
    return "samples", {"images": items}


def _reconstructed(inputs: np.ndarray, again: np.ndarray) -> Event:
    """Each sample on the left, its reconstruction on the right; one grey scale for all."""
    gap = np.full((*inputs.shape[:2], 1, inputs.shape[3]), inputs.max(), np.float32)
    drawn = pictures(np.concatenate([inputs, gap, np.clip(again, inputs.min(), inputs.max())], 2))
    items = [{"png": _text(pixels), "caption": ""} for pixels in drawn]
    return "samples", {"images": items, "note": "Left: the sample. Right: the model's reconstruction."}


def _continued(info: DatasetInfo, tokens: Any, predict: Predict) -> Iterator[Event]:
    """Text generated after the first half of some windows, always with the most likely next token."""
    if not info.vocabulary or np.ndim(tokens) != 2 or tokens.shape[1] < 2:
        return
    window = np.array(tokens[:: max(1, len(tokens) // _TEXTS)][:_TEXTS])
    actual, begin = window.copy(), window.shape[1] // 2
    end = min(window.shape[1], begin + _NEW_TOKENS)
    window[:, begin:] = 0  # a causal model does not look at these tokens
    for place in range(begin, end):
        scores = np.asarray(predict(window))
        if scores.shape != (*window.shape, info.num_classes):
            return
        window[:, place] = scores[:, place - 1].argmax(-1)
    shown = [
        {name: decode(part, info.vocabulary) for name, part in parts.items()}
        for parts in (
            {"prompt": was[:begin], "continued": made[begin:end], "stood there": was[begin:end]}
            for was, made in zip(actual, window, strict=True)
        )
    ]
    yield "samples", {"texts": shown}


def _text(pixels: np.ndarray) -> str:
    return base64.b64encode(png(pixels)).decode()
