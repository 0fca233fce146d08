"""A loss that weighs samples or tokens: its weighted mean over the global batch, wherever samples lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import DataError
from tests.support.trainers import (
    CLASSES,
    FEATURES,
    VAL,
    X,
    Y,
    assert_near,
    by_hand,
    config,
    trainer,
    use_devices,
)
from tests.support.trainers import own_group as own_group

ce = optax.softmax_cross_entropy_with_integer_labels
LINEAR = linen.Dense(CLASSES)
WEIGHT = (1.0, 2.0, 20.0)
SAMPLES = 22  # of 60: the last of three global batches of 8 has 6, so that replicas and micro-batches differ


def after_fit(model, loss, x, y, **options):
    train = trainer(model, loss)
    cfg = config(
        epochs=1,
        batch_size=None,
        global_batch_size=8,
        shuffle=False,
        **options,
    )
    history = train.fit(x, y, cfg)
    return train, history


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {}),
        (4, {"gradient_accumulation_steps": 2}),
        (2, {"comm": "fsdp"}),
        (2, {"reproducibility": "exact", "virtual_replicas": 4, "exact_threads": 8}),
    ],
    ids=["2", "4 by 2", "fsdp", "exact"],
)
def test_replicas_and_micro_batches_equal_one_weighted_mean(replicas, options):
    use_devices(replicas)
    w = jnp.float32(WEIGHT)
    x, y = X[:SAMPLES], Y[:SAMPLES]
    mean = lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum()  # noqa: E731
    expected, _ = by_hand(LINEAR, mean, x, y)
    train, history = after_fit(LINEAR, cx.CrossEntropyLoss(weight=WEIGHT), x, y, **options)
    assert_near(train.params, expected)
    # What is told of an epoch is a mean over its weights too, evaluation as well.
    loss, _ = train.evaluate(*VAL)
    logits = VAL[0] @ np.asarray(train.params["kernel"]) + np.asarray(train.params["bias"])
    own = np.asarray(ce(jnp.asarray(logits), jnp.asarray(VAL[1])))
    np.testing.assert_allclose(loss, np.average(own, weights=np.asarray(WEIGHT)[VAL[1]]), rtol=1e-5)
    assert len(history.train_losses) == 1
    # One that a user wrote, as the pair.
    own, _ = after_fit(LINEAR, lambda o, t: (ce(o, t), w[t]), x, y, **options)
    assert_near(own.params, expected)


def test_weights_below_zero_count_as_they_are_written():
    use_devices(2)
    w = jnp.float32([2.0, -0.5, 3.0])
    train, _ = after_fit(LINEAR, lambda o, t: (ce(o, t), w[t]), X[:SAMPLES], Y[:SAMPLES])
    written = lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum()  # noqa: E731
    assert_near(train.params, by_hand(LINEAR, written, X[:SAMPLES], Y[:SAMPLES])[0])


def test_tokens_that_are_ignored_count_nothing():
    use_devices(2)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, 4, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, (SAMPLES, 4)).astype(np.int32)
    y[rng.random(y.shape) < 0.4] = -100
    y[3] = -100  # a sample of which nothing counts

    def written(o, t):
        counts = t != -100
        return jnp.where(counts, ce(o, jnp.where(counts, t, 0)), 0).sum() / counts.sum().astype(jnp.float32)

    expected, _ = by_hand(LINEAR, written, x, y)
    train, history = after_fit(LINEAR, cx.CrossEntropyLoss(ignore_index=-100), x, y)
    assert_near(train.params, expected)
    _, accuracy = train.evaluate(x, y)
    hit = train.predict(x).argmax(-1) == y
    assert accuracy == pytest.approx(hit[y != -100].mean())
    assert 0 < history.train_accuracies[0] <= 1


def test_a_step_in_which_nothing_counts_changes_nothing():
    use_devices(2)
    nothing, train = (
        np.full(8, -1, np.int32),
        trainer(LINEAR, cx.CrossEntropyLoss(ignore_index=-1)),
    )
    with pytest.raises(DataError, match="training .*ignore_index"):
        train.fit(X[:8], nothing, config(epochs=1, batch_size=4))
    start = adapt(LINEAR).init(jax.random.key(42), X[:1])[0]
    jax.tree.map(np.testing.assert_array_equal, train.params, start)


def test_what_does_not_fit_is_one_line():
    use_devices(2)
    with pytest.raises(DataError, match=r"float32\[2\] .*float32\[4,3\]"):
        trainer(LINEAR, cx.CrossEntropyLoss(weight=[1, 2])).fit(X, Y, config())
    y = Y.copy()
    y[5] = -100
    with pytest.raises(DataError, match="sample 5 .*label -100.*ignore_index=-100"):
        trainer(LINEAR).fit(X, y, config())
