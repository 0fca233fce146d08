"""Losses as people write them: a mean over samples is taken, anything else is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyxjax as cx
from cyxjax.core.losses import as_per_example, of_batch
from cyxjax.core.objective.loss_probe import refuse_unless_mean
from cyxjax.errors import ConfigError, DataError

B, C, T, D = 24, 5, 6, 4
rng = np.random.default_rng(3)
LABELS = rng.integers(0, C, B).astype(np.int32)
ONE_HOT = np.eye(C, dtype=np.float32)[LABELS]
BINARY = rng.integers(0, 2, (B, 1)).astype(np.float32)
REAL = rng.normal(size=(B, D)).astype(np.float32)
COUNTS = rng.poisson(3, (B, 1)).astype(np.float32)
MASKS = rng.integers(0, 2, (B, T)).astype(np.float32)
TOKENS = {"ids": rng.integers(0, C, (B, T)).astype(np.int32), "mask": np.maximum(MASKS, np.eye(T)[[0] * B])}
TOKENS["mask"] = TOKENS["mask"].astype(np.float32)
SPEECH = {
    "labels": rng.integers(1, C, (B, 3)).astype(np.int32),
    "padding": np.tile(np.float32([0, 0, 1]), (B, 1)),
}
CLASS_WEIGHT = jnp.float32([1, 1, 4, 1, 0.5])
ce = optax.softmax_cross_entropy_with_integer_labels


def shapes(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((1, *shape), dtype)


LOGITS, VECTOR, ONE, SEQUENCE = shapes(C), shapes(D), shapes(1), shapes(T, C)
PAIR = {"image": shapes(D), "text": shapes(D)}
TRIPLE = (shapes(D), shapes(D), shapes(D))
VAE = {"mean": shapes(D), "logvar": shapes(D), "image": shapes(9)}


def unit(v):
    return v / jnp.linalg.norm(v, axis=-1, keepdims=True)


def focal(o, t):
    p = jnp.take_along_axis(jax.nn.softmax(o), t[:, None], 1)[:, 0]
    return -((1 - p) ** 2 * jnp.log(p)).mean()


def dice_each(o, t):
    p = jax.nn.sigmoid(o)
    return (1 - 2 * (p * t).sum(-1) / (p.sum(-1) + t.sum(-1) + 1)).mean()


def dice_batch(o, t):
    p = jax.nn.sigmoid(o)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1)


def tversky_batch(o, t):
    p = jax.nn.sigmoid(o)
    hit, extra, missed = (p * t).sum(), (p * (1 - t)).sum(), ((1 - p) * t).sum()
    return 1 - (hit + 1) / (hit + 0.3 * extra + 0.7 * missed + 1)


def info_nce(o, t):
    z = unit(o)
    return ce(z @ z.T / 0.1, jnp.arange(len(z))).mean()


def clip(o, t):
    similar = unit(o["image"]) @ unit(o["text"]).T / 0.07
    labels = jnp.arange(len(similar))
    return (ce(similar, labels).mean() + ce(similar.T, labels).mean()) / 2


def siglip(o, t):
    similar = unit(o["image"]) @ unit(o["text"]).T * 10 - 10
    return -jax.nn.log_sigmoid(similar * (2 * jnp.eye(len(similar)) - 1)).sum(-1).mean()


def supervised_contrastive(o, t):
    z = unit(o)
    log_p = jax.nn.log_softmax(z @ z.T / 0.1 - 1e9 * jnp.eye(len(z)))
    same = (t[:, None] == t[None]) * (1 - jnp.eye(len(z)))
    return -((log_p * same).sum(1) / jnp.maximum(same.sum(1), 1)).mean()


def nt_xent(o, t):
    a, b = jnp.split(unit(o), 2)  # the first half and the second half of a batch are two views
    return ce(a @ b.T / 0.5, jnp.arange(len(a))).mean()


def triplet(o, t):
    anchor, good, bad = o
    near, far = jnp.square(anchor - good).sum(-1), jnp.square(anchor - bad).sum(-1)
    return jnp.maximum(near - far + 1, 0).mean()


def batch_hard(o, t):
    gap = jnp.square(o[:, None] - o[None]).sum(-1)
    same = t[:, None] == t[None]
    return jnp.maximum(jnp.where(same, gap, 0).max(1) - jnp.where(same, jnp.inf, gap).min(1) + 1, 0).mean()


def vicreg_variance(o, t):
    return jnp.maximum(1 - jnp.sqrt(o.var(0) + 1e-4), 0).mean()


def barlow(o, t):
    z = (o["image"] - o["image"].mean(0)) / o["image"].std(0)
    y = (o["text"] - o["text"].mean(0)) / o["text"].std(0)
    return jnp.square(z.T @ y / len(z) - jnp.eye(D)).sum()


def weighted_ce(o, t):
    w = CLASS_WEIGHT[t]
    return (w * ce(o, t)).sum() / w.sum()  # what torch does


def masked_tokens(o, t):
    return (ce(o, t["ids"]) * t["mask"]).sum() / t["mask"].sum()


def masked_each(o, t):
    return ((ce(o, t["ids"]) * t["mask"]).sum(-1) / t["mask"].sum(-1)).mean()


def kl_batchmean(o, t):
    return optax.kl_divergence(jax.nn.log_softmax(o), t).sum() / len(o)


def ctc(o, t):
    return optax.ctc_loss(o, jnp.zeros(o.shape[:2]), t["labels"], t["padding"]).mean()


def vae(o, t):
    kl = 0.5 * (jnp.exp(o["logvar"]) + o["mean"] ** 2 - 1 - o["logvar"]).sum(-1)
    return (optax.sigmoid_binary_cross_entropy(o["image"], 0.5).sum(-1) + kl).mean()


def gaussian_nll(o, t):
    mean, raw = jnp.split(o, 2, axis=-1)
    return 0.5 * (raw + jnp.square(mean - t[:, :2]) / jnp.exp(raw)).mean()


def pinball(o, t):
    d = t - o
    return jnp.maximum(0.9 * d, -0.1 * d).mean()


def pearson(o, t):
    a, b = o - o.mean(), t - t.mean()
    return 1 - (a * b).sum() / jnp.sqrt((a**2).sum() * (b**2).sum())


def cox(o, t):
    order = jnp.argsort(-t[:, 0])
    risk = o[order, 0]
    return -(risk - jax.lax.cumlogsumexp(risk)).mean()


CENTERS = jnp.asarray(rng.normal(size=(C, D)), jnp.float32)

MEANS = {
    "cross entropy": (LOGITS, LABELS, lambda o, t: ce(o, t).mean()),
    "cross entropy of one-hot": (LOGITS, ONE_HOT, lambda o, t: optax.softmax_cross_entropy(o, t).mean()),
    "values, not their mean": (LOGITS, LABELS, ce),
    "label smoothing": (
        LOGITS,
        ONE_HOT,
        lambda o, t: optax.softmax_cross_entropy(o, optax.smooth_labels(t, 0.1)).mean(),
    ),
    "focal": (LOGITS, LABELS, focal),
    "focal of optax": (ONE, BINARY, lambda o, t: optax.sigmoid_focal_loss(o, t).mean()),
    "poly": (LOGITS, ONE_HOT, lambda o, t: optax.poly_loss_cross_entropy(o, t).mean()),
    "nll of log-probabilities": (LOGITS, LABELS, lambda o, t: -jnp.take_along_axis(o, t[:, None], 1).mean()),
    "class weights, undivided": (LOGITS, LABELS, lambda o, t: (CLASS_WEIGHT[t] * ce(o, t)).mean()),
    "binary": (ONE, BINARY, lambda o, t: optax.sigmoid_binary_cross_entropy(o, t).mean()),
    "binary of probabilities": (
        ONE,
        BINARY,
        lambda o, t: -(t * jnp.log(o) + (1 - t) * jnp.log(1 - o)).mean(),
    ),
    "hinge": (ONE, 2 * BINARY - 1, lambda o, t: optax.hinge_loss(o, t).mean()),
    "mse": (VECTOR, REAL, lambda o, t: ((o - t) ** 2).mean()),
    "mse squeezed": (ONE, BINARY[:, 0], lambda o, t: ((o.squeeze() - t) ** 2).mean()),
    "l2 of optax": (VECTOR, REAL, lambda o, t: optax.l2_loss(o, t).mean()),
    "huber": (VECTOR, REAL, lambda o, t: optax.huber_loss(o, t).mean()),
    "log cosh": (VECTOR, REAL, lambda o, t: optax.log_cosh(o, t).mean()),
    "cosine": (VECTOR, REAL, lambda o, t: optax.cosine_distance(o, t).mean()),
    "pinball": (VECTOR, REAL, pinball),
    "gaussian nll": (VECTOR, REAL, gaussian_nll),
    "poisson nll": (ONE, COUNTS, lambda o, t: (jnp.exp(o) - t * o).mean()),
    "kl batchmean": (LOGITS, ONE_HOT, kl_batchmean),
    "kl of optax": (LOGITS, ONE_HOT, lambda o, t: optax.kl_divergence(jax.nn.log_softmax(o), t).mean()),
    "distillation": (
        LOGITS,
        ONE_HOT,
        lambda o, t: 4 * optax.kl_divergence(jax.nn.log_softmax(o / 2), t).mean(),
    ),
    "triplet": (TRIPLE, LABELS, triplet),
    "center": (
        VECTOR,
        LABELS,
        lambda o, t: 0.5 * jnp.square(o - jax.lax.stop_gradient(CENTERS)[t]).sum(-1).mean(),
    ),
    "dice each": (VECTOR, (REAL > 0).astype(np.float32), dice_each),
    "masked each": (SEQUENCE, TOKENS, masked_each),
    "tokens": (SEQUENCE, TOKENS["ids"], lambda o, t: ce(o, t).mean()),
    "ctc": (SEQUENCE, SPEECH, ctc),
    "vae": (VAE, REAL, vae),
    "sum over features": (VECTOR, REAL, lambda o, t: jnp.square(o - t).sum() / o.shape[0]),
    "half precision": (LOGITS, LABELS, lambda o, t: ce(o.astype(jnp.bfloat16), t).mean()),
    "half precision out": (shapes(C, dtype=jnp.bfloat16), LABELS, lambda o, t: ce(o, t).mean()),
    "values and class weights": (LOGITS, LABELS, lambda o, t: (ce(o, t), CLASS_WEIGHT[t])),
    "values and masks of tokens": (SEQUENCE, TOKENS, lambda o, t: (ce(o, t["ids"]), t["mask"])),
    "large and nearly equal": (VECTOR, REAL, lambda o, t: ((o + 1e4) ** 2 - 1e8 - 2e4 * o).mean()),
    "nan at initialisation": (LOGITS, LABELS, lambda o, t: jnp.log(ce(o, t) - 100).mean()),
    "constant": (LOGITS, LABELS, lambda o, t: 0 * o.mean()),
    "numpy": (LOGITS, LABELS, lambda o, t: jnp.mean(ce(o, t) * np.float32(2))),
}

NOT = {
    "info nce": (VECTOR, LABELS, info_nce),
    "info nce, a value each": (VECTOR, LABELS, lambda o, t: ce(unit(o) @ unit(o).T, jnp.arange(len(o)))),
    "clip": (PAIR, LABELS, clip),
    "siglip": (PAIR, LABELS, siglip),
    "supervised contrastive": (VECTOR, LABELS, supervised_contrastive),
    "nt-xent": (VECTOR, LABELS, nt_xent),
    "batch hard": (VECTOR, LABELS, batch_hard),
    "vicreg variance": (VECTOR, LABELS, vicreg_variance),
    "barlow": (PAIR, LABELS, barlow),
    "n-pairs of optax": (PAIR, LABELS, lambda o, t: optax.losses.ntxent(o["image"], t)),
    "class weights": (LOGITS, LABELS, weighted_ce),
    "class weights, nearly equal": (
        LOGITS,
        LABELS,
        lambda o, t: (ce(o, t) * (1 + 0.05 * (t == 1))).sum() / (1 + 0.05 * (t == 1)).sum(),
    ),
    "masked": (SEQUENCE, TOKENS, masked_tokens),
    "padding 0 left out": (
        SEQUENCE,
        TOKENS["ids"],
        lambda o, t: (ce(o, t) * (t != 0)).sum() / jnp.maximum((t != 0).sum(), 1),
    ),
    "dice": (VECTOR, (REAL > 0).astype(np.float32), dice_batch),
    "tversky": (VECTOR, (REAL > 0).astype(np.float32), tversky_batch),
    "rmse": (VECTOR, REAL, lambda o, t: jnp.sqrt(((o - t) ** 2).mean())),
    "perplexity": (LOGITS, LABELS, lambda o, t: jnp.exp(ce(o, t).mean())),
    "pearson": (ONE, COUNTS, pearson),
    "cox": (ONE, COUNTS, cox),
    "worst sample": (LOGITS, LABELS, lambda o, t: ce(o, t).max()),
    "hardest half": (LOGITS, LABELS, lambda o, t: jnp.sort(ce(o, t))[len(o) // 2 :].mean()),
    "spread": (VECTOR, REAL, lambda o, t: ((o - t) ** 2).mean() + 0.1 * o.mean(0).std()),
    "nan for one": (VECTOR, REAL, lambda o, t: ((o - t) ** 2).mean() / o.std(0, ddof=1).mean()),
    "values and weights of the others": (LOGITS, LABELS, lambda o, t: (ce(o, t), CLASS_WEIGHT[t[::-1]])),
    "values of the others, weighted": (LOGITS, LABELS, lambda o, t: (ce(o, t)[::-1], CLASS_WEIGHT[t])),
    "mean without one": (VECTOR, REAL, lambda o, t: jnp.square(o - t).sum() / (len(o) - 1)),
}


def probe(output, target, loss, batch_size=4):
    # As users run it: the strictness of these tests is for our own code.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        refuse_unless_mean(as_per_example(loss), output, target, batch_size)


# By default one of each way that samples meet: the rest differ from one of these in their arithmetic alone.
SLOW = {
    *("cross entropy of one-hot", "label smoothing", "focal of optax", "poly", "nll of log-probabilities"),
    *("binary of probabilities", "hinge", "l2 of optax", "huber", "log cosh", "cosine", "pinball"),
    *("poisson nll", "kl of optax", "distillation", "center", "dice each", "numpy"),
    *(
        "info nce, a value each",
        "siglip",
        "nt-xent",
        "batch hard",
        "n-pairs of optax",
        "tversky",
        "perplexity",
    ),
}


def some_slow(table):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in table]


@pytest.mark.parametrize("name", some_slow(MEANS))
def test_means_over_samples_are_taken(name):
    probe(*MEANS[name])


@pytest.mark.parametrize("name", some_slow(NOT))
def test_what_is_no_mean_over_samples_is_refused_in_one_line(name):
    with pytest.raises(
        ConfigError, match=r"HINT: return one value a sample.*\(values, weights\).*cx.GlobalLoss"
    ) as refused:
        probe(*NOT[name])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("loss", [lambda o, t: ce(o, t).sum(), lambda o, t: optax.l2_loss(o).sum()])
def test_a_sum_is_said_to_be_one(loss):
    with pytest.raises(ConfigError, match="is their sum.*leave out the final sum"):
        probe(LOGITS, LABELS, loss)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda o, t: ce(jnp.repeat(o, 3, 0), jnp.repeat(t, 3)), r"8 samples has shape \(24,\).*HINT"),
        (lambda o, t: ce(o, t).mean(keepdims=True), r"8 samples has shape \(1,\).*HINT"),
        (
            lambda o, t: (ce(o, t).mean(), {"accuracy": 1.0}),
            r"gave a tuple of shapes \[\(\), None\], expected \(values, weights\).*HINT",
        ),
    ],
)
def test_what_is_no_value_a_sample_by_its_shape(loss, said):
    with pytest.raises(DataError, match=said):
        probe(LOGITS, LABELS, loss)


def test_a_gradient_that_ties_samples_together_is_refused():
    def free(v):  # no value, but a gradient
        return v - jax.lax.stop_gradient(v)

    with pytest.raises(ConfigError, match="but its gradient is not.*HINT"):
        probe(LOGITS, LABELS, lambda o, t: ce(o, t).mean() + free(jnp.square(o.mean(0)).sum()))


def test_a_batch_of_one_that_is_not_taken():
    def pairs(o, t):
        assert len(o) % 2 == 0, "an even number of samples"
        return jnp.square(o[::2] - o[1::2]).mean()

    with pytest.raises(ConfigError, match="takes 8 samples but not one alone"):
        probe(VECTOR, REAL, pairs)


def test_a_loss_for_one_batch_size_is_probed_at_it():
    with pytest.raises(ConfigError, match="the loss of 12 samples is"):
        probe(VECTOR, REAL, lambda o, t: ce(o @ o.T, jnp.arange(12)).mean(), batch_size=12)


def test_an_axis_may_be_named():
    probe(VECTOR, REAL, lambda o, t: jnp.square(o - t).mean() + 0 * jax.lax.axis_index("data"))


def test_the_rare_class_is_asked_too():
    # One sample in a hundred is of class 1; its weight makes all the difference, and only it shows that.
    labels = np.zeros(200, np.int32)
    labels[150] = 1
    weight = jnp.float32([1, 30])
    loss = lambda o, t: (weight[t] * ce(o, t)).sum() / weight[t].sum()  # noqa: E731
    with pytest.raises(ConfigError, match="no mean of one value a sample"):
        probe(shapes(2), labels[:8], loss)


def test_losses_of_ours_and_of_models_are_not_asked():
    probe(LOGITS, LABELS, cx.CrossEntropyLoss())
    probe({"loss": shapes()}, LABELS, None)


def test_the_facade_computes_the_loss_as_it_is_written():
    vectors = jnp.asarray(REAL)
    assert of_batch(info_nce, vectors, LABELS) == info_nce(vectors, LABELS) > 0.1  # one by one it is 0
    np.testing.assert_allclose(
        of_batch(ce, vectors[:, :C], LABELS % D), ce(vectors, LABELS % D).mean(), rtol=1e-6
    )


FLAT = {
    "share of the wrong": (LOGITS, LABELS, lambda o, t: o.argmax(-1) != t),
    "their mean": (LOGITS, LABELS, lambda o, t: (o.argmax(-1) != t).mean()),
    "rounded": (VECTOR, REAL, lambda o, t: jnp.round(o - t).mean(-1)),
    "stopped": (VECTOR, REAL, lambda o, t: ((jax.lax.stop_gradient(o) - t) ** 2).mean(-1)),
    "weighted": (LOGITS, LABELS, lambda o, t: ((o.argmax(-1) != t) * 1.0, CLASS_WEIGHT[t])),
}


@pytest.mark.parametrize("name", FLAT)
def test_a_loss_without_a_gradient_is_refused(name):
    with pytest.raises(ConfigError, match="the loss has no gradient: .* HINT: compare logits"):
        probe(*FLAT[name])


AUX = {
    "correct": (LOGITS, LABELS, lambda o, t: (ce(o, t), (o.argmax(-1) == t).astype(jnp.float32))),
    "correct as bool": (LOGITS, LABELS, lambda o, t: (ce(o, t), o.argmax(-1) == t)),
    "of one-hot labels": (
        LOGITS,
        ONE_HOT,
        lambda o, t: (optax.softmax_cross_entropy(o, t), o.argmax(-1) == t.argmax(-1)),
    ),
    "predictions": (LOGITS, LABELS, lambda o, t: (ce(o, t), o.argmax(-1))),
    "of a dict": (
        {"logits": LOGITS, "features": VECTOR},
        {"label": LABELS},
        lambda o, t: (ce(o["logits"], t["label"]), o["logits"].argmax(-1) == t["label"]),
    ),
    "one logit": (
        ONE,
        BINARY,
        lambda o, t: (optax.sigmoid_binary_cross_entropy(o, t), (o > 0) == t),
    ),
    "of tokens": (SEQUENCE, TOKENS["ids"], lambda o, t: (ce(o, t), o.argmax(-1) == t)),
}


@pytest.mark.parametrize("name", AUX)
def test_hits_and_predictions_are_no_weights(name):
    with pytest.raises(ConfigError, match=r"second part is (whether|the pred).* HINT: return the loss alone"):
        probe(*AUX[name])


def test_weights_that_look_at_the_output_are_weights():
    confident = lambda o, t: jax.nn.softmax(o).max(-1) > 0.5  # noqa: E731
    for weights in (
        confident,
        lambda o, t: confident(o, t) & (o.argmax(-1) == t),
        lambda o, t: ce(o, t) > 1.0,
        lambda o, t: o.argmax(-1) != t,
        lambda o, t: t != 2,
        lambda o, t: jnp.ones(len(t)),
    ):
        probe(LOGITS, LABELS, lambda o, t, w=weights: (ce(o, t), w(o, t)))
    probe(ONE, BINARY, lambda o, t: (optax.sigmoid_binary_cross_entropy(o, t), t))


def test_a_constant_and_a_loss_that_is_flat_in_places_are_taken():
    probe(LOGITS, LABELS, lambda o, t: jnp.zeros(len(t)))  # beside what a model sows
    probe(VECTOR, REAL, lambda o, t: jnp.maximum(jnp.abs(o - t) - 1, 0).mean(-1))


def test_a_complex_loss_is_refused():
    with pytest.raises(ConfigError, match="the loss is complex.* HINT"):
        probe(VECTOR, REAL, lambda o, t: (o - t).mean(-1) + 0j)
