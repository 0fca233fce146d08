"""Predictions for test samples in the report: by the kind of task, and without affecting the run."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest

from cyxjax.data.sources import ArrayDataset
from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.data.streams import Batches
from cyxjax.observe.report.predictions import pictures
from cyxjax.train.feeding import samples

IMAGES = np.random.default_rng(0).random((6, 8, 8, 1)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0, 1, 2], np.int32)


def logged(inputs, targets, predict, info, most=100):
    """(events, warnings) of the predictions for these test samples."""
    found, warnings = {}, []
    data = inputs if targets is None else ArrayDataset(inputs, targets)
    events = SimpleNamespace(log=lambda event, **values: found.update({event: values}))
    samples.log_samples(Splits(data, data, data, info), most, predict, events, warnings.append, 255)
    return found, warnings


def test_pictures_are_grey_or_coloured_and_not_too_large():
    drawn = pictures(np.array([0.0, 1.0, 2.0, 4.0]).reshape(1, 2, 2, 1))
    assert drawn.tolist() == [[[[0] * 3, [64] * 3], [[128] * 3, [255] * 3]]]
    assert pictures(np.zeros((2, 300, 100, 3))).shape == (2, 75, 25, 3)


def info(task="classification", classes=3, shape=(8, 8, 1), **more):
    return DatasetInfo("it", task, classes, shape, **more)


@pytest.mark.parametrize("ignored", [[], [-1, -100, 255]])  # labels of samples that belong to no class
def test_the_surest_mistakes_come_first_then_what_was_right(ignored):
    labels = np.array([*LABELS, *ignored], np.int32)
    scores = np.eye(3)[labels % 3] * 4.0
    scores[1], scores[5] = [0.1, 0, 0], [9, 0, 0]  # two mistakes; of the last it is surer
    images = np.resize(IMAGES, (len(labels), 8, 8, 1))
    events, _ = logged(images, labels, lambda x: scores, info(class_names=("a", "b", "c")))
    captions = [item["caption"] for item in events["samples"]["images"]]
    assert captions == ["c, taken for a", "b, taken for a", "a", "c", "a", "b"]
    assert np.sum(events["predictions"]["confusion"]) == 6


def test_boolean_labels_count_as_0_and_1():
    labels = np.array([True, False, True, True])
    events, _ = logged(IMAGES[:4], labels, lambda x: np.eye(2)[[1, 0, 0, 1]], info(classes=2))
    assert events["predictions"]["confusion"] == [[1, 0], [1, 2]]
    assert len(events["samples"]["images"]) == 4


def unpacked(text):
    """The pixels of a PNG."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    return np.asarray(image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def test_a_reconstruction_stands_beside_its_sample():
    events, _ = logged(IMAGES, LABELS, lambda x: {"reconstruction": 1 - x, "mean": x[:, 0]}, info())
    images = [unpacked(item["png"]) for item in events["samples"]["images"]]
    assert [image.shape for image in images] == [(8, 17, 3)] * 6  # sample, a line, what was made of it
    left, right = (images[0][..., 0][:, part].astype(int) for part in (slice(0, 8), slice(9, 17)))
    assert np.corrcoef(left.ravel(), right.ravel())[0, 1] < -0.9


def test_text_is_gone_on_with_by_the_likeliest_token_and_sees_nothing_ahead():
    vocabulary, seen = "abcd", []

    def next_letter(tokens):
        seen.append(tokens.copy())
        return np.eye(4)[(tokens + 1) % 4]

    tokens = np.tile(np.array([0, 3, 1, 0, 2, 2], np.int32), (5, 1))
    events, _ = logged(tokens, tokens, next_letter, info("language", 4, (6,), vocabulary=vocabulary))
    (first, *_) = events["samples"]["texts"]
    assert first == {"prompt": "adb", "continued": "cda", "stood there": "acc"}
    assert not seen[0][:, 3:].any()


@pytest.mark.parametrize(
    ("inputs", "predict", "what"),
    [
        (IMAGES[..., 0, 0], lambda x: np.eye(3)[LABELS], {"predictions"}),  # a table is not an image
        (IMAGES, lambda x: np.zeros((6, 9)), set()),
        (IMAGES, lambda x: {"loss": 1.0}, set()),
        ((IMAGES, IMAGES), lambda x: np.eye(3)[LABELS], set()),
        (Batches([(IMAGES, LABELS)]), lambda x: np.eye(3)[LABELS], set()),  # a stream has no first samples
    ],
)
def test_what_is_no_picture_and_no_score_a_class_is_left_out(inputs, predict, what):
    targets = None if isinstance(inputs, Batches) else LABELS
    events, warnings = logged(inputs, targets, predict, info())
    assert set(events) == what
    assert warnings == []


def test_a_model_that_cannot_predict_costs_one_line():
    events, warnings = logged(IMAGES, LABELS, lambda x: 1 / 0, info())
    assert warnings == ["WARNING: the report shows no predictions: ZeroDivisionError: division by zero"]
    assert events == {}
    assert logged(IMAGES, LABELS, lambda x: 1 / 0, info(), most=0) == ({}, [])
