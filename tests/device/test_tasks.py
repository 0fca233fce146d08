"""A task defines the use of a model's output; on two devices each trains like a hand-written step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import ConfigError, DataError
from tests.support.by_hand import assert_as_by_hand
from tests.support.models import UNIFORM, Dense
from tests.support.trainers import CLASSES, FEATURES, X, Y, assert_near, ce, config, trained, trainer

pytestmark = pytest.mark.usefixtures("two_devices")

LINEAR = Dense(CLASSES)
SAMPLES = 19
NEAR = 1e-4, 1e-5  # to the same by hand on one device
TEXT = np.random.default_rng(2).integers(1, 5, (SAMPLES, 6)).astype(np.int32)
TEXT[::3, 4:] = 0  # padding
PIXELS = (X > 0).astype(np.float32)[:SAMPLES]
TEACHER = np.random.default_rng(3).normal(size=(SAMPLES, CLASSES)).astype(np.float32)


class Heads(linen.Module):
    """Two outputs by name."""

    @linen.compact
    def __call__(self, x):
        h = linen.relu(Dense(8)(x))
        return {"logits": Dense(CLASSES)(h), "sum": Dense(1)(h)[:, 0]}


class Vae(linen.Module):
    """(logits, mean, logvar), as in Flax's example; without noise, so that numbers are comparable."""

    @linen.compact
    def __call__(self, x):
        h = linen.relu(Dense(8)(x))
        mean, logvar = Dense(2)(h), Dense(2)(h)
        return Dense(FEATURES)(mean), mean, logvar


class Text(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        return Dense(5)(linen.Embed(5, 8, embedding_init=UNIFORM)(tokens))


def vae_by_hand(o, t):
    logits, mean, logvar = o
    bce = (jnp.logaddexp(0, logits) - t * logits).sum(-1)
    return (bce - 0.5 * 0.3 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1)).mean()


def text_by_hand(o, t):
    counts = (t != 0).astype(jnp.float32)
    return (ce(o, t) * counts).sum() / counts.sum()


def distilled_by_hand(o, t):
    labels, teacher = t
    p, q = jax.nn.log_softmax(teacher / 3), jax.nn.log_softmax(o / 3)
    return 0.4 * 9 * (jnp.exp(p) * (p - q)).sum(-1).mean() + 0.6 * ce(o, labels).mean()


def two_terms_by_hand(o, t):
    return ce(o["logits"], t["label"]).mean() + 0.25 * jnp.square(o["sum"] - t["sum"]).mean()


def masks_by_hand(o, t):
    counts = (t != 0).astype(jnp.float32)
    tokens = (ce(o, t) * counts).sum() / counts.sum()
    rare = jnp.where(t == 4, 3.0, 0.5)
    return tokens + 0.3 * (jnp.square(o).sum(-1) * rare).sum() / rare.sum() + 0.1 * jnp.square(o).mean()


MASKS = cx.Task(
    {
        "tokens": cx.CrossEntropyLoss(ignore_index=0),
        "rare": (lambda o, t: (jnp.square(o).sum(-1), jnp.where(t == 4, 3.0, 0.5)), 0.3),
        "small": (lambda o, t: jnp.square(o).mean((1, 2)), 0.1),
    }
)
TWO = cx.Task(
    {
        "label": lambda o, t: ce(o["logits"], t["label"]).mean(),  # a mean, as users write it
        "sum": (lambda o, t: jnp.square(o["sum"] - t["sum"]), 0.25),
    },
    metrics={"near": lambda o, t: (jnp.abs(o["sum"] - t["sum"]) < 1).astype(jnp.float32)},
    better={"near": "max"},
)
BOTH = {"label": Y[:SAMPLES], "sum": X[:SAMPLES].sum(1)}


@pytest.mark.parametrize(
    ("model", "x", "y", "task", "loss"),
    [
        (Vae(), PIXELS, PIXELS, cx.Task.vae(0.3), vae_by_hand),
        (Text(), TEXT, TEXT, cx.Task.language(ignore_index=0), text_by_hand),
        (LINEAR, X[:SAMPLES], (Y[:SAMPLES], TEACHER), cx.Task.distillation(3.0, 0.4), distilled_by_hand),
    ],
    ids=["vae", "language", "distillation"],
)
def test_a_task_trains_as_the_same_by_hand_on_one_device(model, x, y, task, loss):
    train, _ = assert_as_by_hand(model, task, x, y, written=loss, near=NEAR)
    assert np.isfinite(train.history.train_losses[0])


def test_terms_that_weigh_by_themselves_are_cut_by_nothing():
    # One step per epoch, whose loss is the sum of its terms; cut, one micro-batch of 8 has only padding.
    once = {"size": 32, "epochs": 2}
    cut = trained(Text(), MASKS, TEXT, TEXT, gradient_accumulation_steps=2, **once)
    train, losses = assert_as_by_hand(Text(), MASKS, TEXT, TEXT, written=masks_by_hand, near=NEAR, **once)
    for history in (cut.history, train.history):
        tokens, rare, small = (np.array(history.metrics[f"train_{n}"]) for n in ("tokens", "rare", "small"))
        np.testing.assert_allclose(
            [history.train_losses, tokens + 0.3 * rare + 0.1 * small], [losses, losses], rtol=1e-5
        )
    assert_near(cut.params, train.params)
    found = train.evaluate_metrics(TEXT, TEXT, batch_size=2)
    whole = float(jax.jit(masks_by_hand)(train.predict(TEXT), TEXT))
    assert found["loss"] == pytest.approx(whole, rel=1e-5)
    assert found["loss"] == pytest.approx(found["tokens"] + 0.3 * found["rare"] + 0.1 * found["small"])


def test_a_step_in_which_no_term_counts_is_not_in_the_loss():
    task = cx.Task({"a": cx.CrossEntropyLoss(ignore_index=0), "b": (cx.CrossEntropyLoss((0, 1, 2)), 0.5)})
    labels = np.where(np.arange(16) < 8, 1 + Y[:16] % 2, 0)
    both, first = (trained(LINEAR, task, X[:n], labels[:n]) for n in (16, 8))
    assert both.history.train_losses == first.history.train_losses
    with pytest.raises(DataError, match="evaluated .*ignore_index"):
        both.evaluate(X[8:16], labels[8:])


def test_terms_and_metrics_are_measured_by_name():
    x, y = X[:SAMPLES], BOTH
    train, _ = assert_as_by_hand(
        Heads(), TWO, x, y, written=two_terms_by_hand, near=NEAR, data=(x, y, x, y), monitor="val_near"
    )
    metrics = train.evaluate_metrics(x, y)
    assert metrics["loss"] == pytest.approx(metrics["label"] + 0.25 * metrics["sum"], rel=1e-5)
    assert {f"{split}_{name}" for split in ("train", "val") for name in ("label", "sum", "near")} <= set(
        train.history.metrics
    )
    out = train.predict(x)
    assert metrics["near"] == pytest.approx((np.abs(out["sum"] - y["sum"]) < 1).mean())
    given = cx.Metrics({"best": cx.top_k(1)}, labels=lambda o, t: (-o, t), ignore_index=1)
    labels = trained(
        Heads(),
        cx.Task.classification(output="logits").with_metrics({"one": lambda o, t: jnp.ones(len(t))}),
        x,
        Y[:SAMPLES],
        metrics=given,
    )
    logits, metrics = labels.predict(x)["logits"], labels.evaluate_metrics(x, Y[:SAMPLES])
    assert metrics["one"] == 1
    assert metrics["best"] == pytest.approx((logits.argmax(-1) == Y[:SAMPLES]).mean())
    assert metrics["accuracy"] == pytest.approx((logits.argmin(-1) == Y[:SAMPLES])[Y[:SAMPLES] != 1].mean())


def with_label(label):
    """`Y` with `label` in place of that of sample 4."""
    return np.where(np.arange(len(Y)) == 4, np.int32(label), Y)


COUPLED = cx.Task({"a": cx.CrossEntropyLoss(), "b": lambda o, t: o.std(0).mean()})


@pytest.mark.parametrize(
    ("model", "task", "labels", "error", "message"),
    [
        (
            Heads(),
            cx.Task.classification(output="logits"),
            with_label(9),
            DataError,
            "sample 4 .*label 9.*3 outputs",
        ),
        (
            Heads(),
            cx.Task.classification(output="logits"),
            with_label(-100),
            DataError,
            "sample 4 .*label -100.*ignore_index=-100",
        ),
        (Heads(), cx.Task.classification(output="logit"), Y, KeyError, "logit"),
        (LINEAR, COUPLED, Y, ConfigError, r"'b' .*\(values, weights\).*cx\.GlobalLoss"),
    ],
)
def test_what_does_not_fit_is_one_line(model, task, labels, error, message):
    with pytest.raises(error, match=message):
        trainer(model, task).fit(X, labels, config())


@pytest.mark.parametrize(
    ("first", "message"),
    [(cx.ContrastiveLoss(), r"'a' .*fn\(output, target, weight\)"), (MASKS, "'a' .*Task")],
)
def test_what_is_no_term_is_refused_by_a_trainer(first, message):
    with pytest.raises(ConfigError, match=message):
        trainer(LINEAR, cx.Task({"a": first, "b": cx.MSELoss()}))
