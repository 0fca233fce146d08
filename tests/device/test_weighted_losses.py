"""A loss with weights for samples or tokens: its weighted mean over the global batch on any replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import DataError
from tests.support.by_hand import assert_as_by_hand
from tests.support.models import Dense
from tests.support.trainers import CLASSES, FEATURES, VAL, X, Y, ce, config, trainer

pytestmark = pytest.mark.usefixtures("two_devices")

LINEAR = Dense(CLASSES)
WEIGHT = (1.0, 2.0, 20.0)
SAMPLES = 22  # of 60: the last of three global batches of 8 has 6, so that replicas and micro-batches differ


def pairs(weight):
    """A user's loss with class weights, and the same as one number."""
    w = jnp.float32(weight)
    return lambda o, t: (ce(o, t), w[t]), jax.jit(lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum())


PAIR, MEAN = pairs(WEIGHT)  # once: the loops by hand share a program


@pytest.mark.parametrize(
    ("losses", "replicas", "options"),
    [
        ((PAIR, cx.CrossEntropyLoss(weight=WEIGHT)), 2, {}),
        ((cx.CrossEntropyLoss(weight=WEIGHT),), 4, {"gradient_accumulation_steps": 2}),
        ((PAIR,), 2, {"comm": "fsdp"}),
        (
            (cx.CrossEntropyLoss(weight=WEIGHT),),
            2,
            {"reproducibility": "exact", "virtual_replicas": 4, "exact_threads": 8},
        ),
    ],
    ids=["2", "4 by 2", "fsdp", "exact"],
)
def test_replicas_and_micro_batches_equal_one_weighted_mean(losses, replicas, options):
    x, y = X[:SAMPLES], Y[:SAMPLES]
    for loss in losses:
        train, _ = assert_as_by_hand(LINEAR, loss, x, y, written=MEAN, replicas=replicas, **options)
    # Evaluation reports a weighted mean too.
    np.testing.assert_allclose(train.evaluate(*VAL)[0], MEAN(train.predict(VAL[0]), VAL[1]), rtol=1e-5)


def test_weights_below_zero_count_as_they_are_written():
    pair, mean = pairs([2.0, -0.5, 3.0])
    assert_as_by_hand(LINEAR, pair, X[:SAMPLES], Y[:SAMPLES], written=mean)


def test_tokens_that_are_ignored_count_nothing():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, 4, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, (SAMPLES, 4)).astype(np.int32)
    y[rng.random(y.shape) < 0.4] = -100
    y[3] = -100  # a sample with only ignored labels

    def written(o, t):
        counts = t != -100
        return jnp.where(counts, ce(o, jnp.where(counts, t, 0)), 0).sum() / counts.sum().astype(jnp.float32)

    train, _ = assert_as_by_hand(LINEAR, cx.CrossEntropyLoss(ignore_index=-100), x, y, written=written)
    _, accuracy = train.evaluate(x, y)
    hit = train.predict(x).argmax(-1) == y
    assert accuracy == pytest.approx(hit[y != -100].mean())
    assert 0 < train.history.train_accuracies[0] <= 1


def test_class_weights_that_do_not_fit_are_one_line():
    with pytest.raises(DataError, match=r"float32\[2\] .*float32\[3\]"):
        trainer(LINEAR, cx.CrossEntropyLoss(weight=[1, 2])).fit(X, Y, config())
