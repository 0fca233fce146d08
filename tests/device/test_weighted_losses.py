"""A loss that weighs samples or tokens: its weighted mean over the global batch, wherever samples lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError, DataError
from tests.support.trainers import CLASSES, FEATURES, VAL, X, Y, config, trainer, use_devices
from tests.support.trainers import own_group as own_group

ce = optax.softmax_cross_entropy_with_integer_labels
WEIGHT = (1.0, 2.0, 20.0)
SAMPLES = 22  # of 60: the last of three global batches of 8 has 6, so that replicas and micro-batches differ


class Linear(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES, name="out")(x)


class PerToken(linen.Module):
    """Logits (B, T, C) of features (B, T, F)."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES, name="out")(x)


def one_device(model, loss_of_batch, x, y, batches):
    """Parameters after SGD steps of 0.1 on the loss of each whole batch, as anyone would write it."""
    params = adapt(model).init(jax.random.key(42), x[:1])[0]
    grad = jax.jit(jax.grad(lambda p, x, y: loss_of_batch(model.apply({"params": p}, x), y)))
    for rows in batches:
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad(params, x[rows], y[rows]))
    return params


def after_fit(model, loss, x, y, *, accumulation=1, **options):
    train = trainer(model, loss, **options)
    cfg = config(
        epochs=1,
        batch_size=None,
        global_batch_size=8,
        gradient_accumulation_steps=accumulation,
        shuffle=False,
    )
    history = train.fit(x, y, cfg)
    return train, history


def batches_of(count, size=8):
    return [np.arange(i, min(i + size, count)) for i in range(0, count, size)]


def assert_same(train, params):
    # Rounding of sums in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), train.params, params)


@pytest.mark.parametrize(("replicas", "accumulation"), [(2, 1), (4, 2)])
def test_replicas_and_micro_batches_equal_one_weighted_mean(replicas, accumulation):
    use_devices(replicas)
    w = jnp.float32(WEIGHT)
    x, y = X[:SAMPLES], Y[:SAMPLES]
    expected = one_device(
        Linear(), lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum(), x, y, batches_of(SAMPLES)
    )
    train, history = after_fit(Linear(), cx.CrossEntropyLoss(weight=WEIGHT), x, y, accumulation=accumulation)
    assert_same(train, expected)
    # What is told of an epoch is a mean over its weights too, evaluation as well.
    loss, _ = train.evaluate(*VAL)
    logits = VAL[0] @ np.asarray(train.params["out"]["kernel"]) + np.asarray(train.params["out"]["bias"])
    own = np.asarray(ce(jnp.asarray(logits), jnp.asarray(VAL[1])))
    np.testing.assert_allclose(loss, np.average(own, weights=np.asarray(WEIGHT)[VAL[1]]), rtol=1e-5)
    assert len(history.train_losses) == 1
    # One that a user wrote, as the pair.
    own, _ = after_fit(Linear(), lambda o, t: (ce(o, t), w[t]), x, y, accumulation=accumulation)
    assert_same(own, expected)


def test_weights_below_zero_count_as_they_are_written():
    use_devices(2)
    w = jnp.float32([2.0, -0.5, 3.0])
    train, _ = after_fit(Linear(), lambda o, t: (ce(o, t), w[t]), X[:SAMPLES], Y[:SAMPLES])
    written = lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum()  # noqa: E731
    assert_same(train, one_device(Linear(), written, X, Y, batches_of(SAMPLES)))


def test_tokens_that_are_ignored_count_nothing():
    use_devices(2)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(SAMPLES, 4, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, (SAMPLES, 4)).astype(np.int32)
    y[rng.random(y.shape) < 0.4] = -100
    y[3] = -100  # a sample of which nothing counts

    def by_hand(o, t):
        counts = t != -100
        return jnp.where(counts, ce(o, jnp.where(counts, t, 0)), 0).sum() / counts.sum().astype(jnp.float32)

    expected = one_device(PerToken(), by_hand, x, y, batches_of(SAMPLES))
    train, history = after_fit(PerToken(), cx.CrossEntropyLoss(ignore_index=-100), x, y)
    assert_same(train, expected)
    _, accuracy = train.evaluate(x, y)
    hit = train.predict(x).argmax(-1) == y
    assert accuracy == pytest.approx(hit[y != -100].mean())
    assert 0 < history.train_accuracies[0] <= 1


def test_a_step_in_which_nothing_counts_changes_nothing():
    use_devices(2)
    nothing, train = np.full(8, -1, np.int32), trainer(Linear(), cx.CrossEntropyLoss(ignore_index=-1))
    with pytest.raises(DataError, match="training .*ignore_index"):
        train.fit(X[:8], nothing, config(epochs=1, batch_size=4))
    start = adapt(Linear()).init(jax.random.key(42), X[:1])[0]
    jax.tree.map(np.testing.assert_array_equal, train.params, start)


def test_the_same_bits_in_parts():
    # Exact mode sums parts up before it divides: V parts on one device and on two.
    def bits(replicas):
        use_devices(replicas)
        cfg = config(
            epochs=1,
            batch_size=None,
            global_batch_size=8,
            reproducibility="exact",
            virtual_replicas=4,
            exact_threads=8,
            shuffle=False,
        )
        train = trainer(Linear(), cx.CrossEntropyLoss(weight=WEIGHT))
        train.fit(X[:SAMPLES], Y[:SAMPLES], cfg)
        return train

    one, two = bits(1), bits(2)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
    w = jnp.float32(WEIGHT)
    expected = one_device(
        Linear(), lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum(), X, Y, batches_of(SAMPLES)
    )
    assert_same(two, expected)


def test_with_parameters_in_parts():
    use_devices(2)
    w = jnp.float32(WEIGHT)
    expected = one_device(
        Linear(), lambda o, t: (w[t] * ce(o, t)).sum() / w[t].sum(), X[:8], Y[:8], batches_of(8)
    )
    train = trainer(Linear(), cx.CrossEntropyLoss(weight=WEIGHT))
    train.fit(X[:8], Y[:8], config(epochs=1, batch_size=4, shuffle=False, comm="fsdp"))
    assert_same(train, expected)


def test_what_does_not_fit_is_one_line():
    use_devices(2)
    with pytest.raises(DataError, match="CrossEntropyLoss .*2 .*3 outputs"):
        trainer(Linear(), cx.CrossEntropyLoss(weight=[1, 2])).fit(X, Y, config())
    with pytest.raises(ConfigError, match=r"weight=\[1, -2\]"):
        cx.CrossEntropyLoss(weight=[1, -2])
    y = Y.copy()
    y[5] = -100
    with pytest.raises(DataError, match="sample 5 .*label -100.*ignore_index=-100"):
        trainer(Linear()).fit(X, y, config())
