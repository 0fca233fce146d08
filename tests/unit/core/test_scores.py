"""Named metrics compared with scikit-learn's, for any distribution of the samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import ConfigError, DataError
from tests.support import sklearn_metrics as sk
from tests.support.trainers import config, trainer
from tests.support.trainers import one_device as one_device
from tests.support.trainers import own_group as own_group

rng = np.random.default_rng(0)
N, C = 41, 4  # a class of C does not occur
LOGITS = rng.normal(size=(N, C)).astype(np.float32)
LABELS = rng.integers(0, 3, N).astype(np.int32)
SCORES = rng.normal(size=N).astype(np.float32)
BINARY = (SCORES + rng.normal(size=N) > 0).astype(np.int32)
TEXT, TOKENS = rng.normal(size=(9, 5, C)).astype(np.float32), rng.integers(0, C, (9, 5)).astype(np.int32)
REAL = (1e4 + rng.normal(size=(N, 2))).astype(np.float32)


def measured(metric, output, target, cuts=(3, 20)):
    """The metric from sums over parts of the samples, as on replicas; at least two rows are padding, NaN."""
    metrics = metric if isinstance(metric, cx.Metrics) else cx.Metrics({"it": metric})
    total, sums = np.zeros((metrics.num_rows, 2)), jax.jit(metrics.sums)
    parts = np.split(np.arange(len(target)), [cut for cut in cuts if cut < len(target)])
    size = len(target) + 2  # one shape for all, however the samples are cut: one program
    for rows in parts:
        padded, is_real = np.resize(rows, size), np.arange(size) < len(rows)
        o = output[padded]
        o[~is_real] = np.nan
        total += np.asarray(sums(jnp.zeros(size), o, target[padded], jnp.float32(is_real)))
    return metrics.means(total)


NAMES = ["cat", "dog", "cow", "hen"]


@pytest.mark.parametrize("cuts", [(), (3, 20)])
def test_top_k_recall_and_precision_are_scikit_learn_s_over_any_split(cuts):
    found = measured(cx.Metrics({"top2": cx.top_k(2), **cx.per_class(NAMES)}), LOGITS, LABELS, cuts)
    each = {"labels": range(C), "average": None, "zero_division": np.nan}
    recall, precision = (f(LABELS, LOGITS.argmax(-1), **each) for f in (sk.recall_score, sk.precision_score))
    assert found["top2"] == pytest.approx(sk.top_k_accuracy_score(LABELS, LOGITS, k=2, labels=range(C)))
    assert [found[f"recall_{name}"] for name in NAMES] == pytest.approx(list(recall), nan_ok=True)
    assert [found[f"precision_{name}"] for name in NAMES] == pytest.approx(list(precision))
    assert np.isnan(found["recall_hen"])


def test_no_class_and_no_number_are_misses_of_top_k():
    labels = np.array([3, 255, 3], np.uint8)  # 255 is not -1
    logits = np.where(np.arange(C) == 3, np.float32([[9], [9], [np.nan]]), LOGITS[:3])
    hit, kept = jax.jit(cx.top_k(2, ignore_index=-1))(logits, labels)
    assert (hit.tolist(), kept.tolist()) == ([1, 0, 0], [1, 1, 1])
    assert cx.top_k(C + 1)(logits[:2], labels[:2])[0].tolist() == [1, 0]


def test_what_is_ignored_or_below_0_counts_nowhere():
    def own(index):
        each = cx.per_class(NAMES, ignore_index=index)
        ours = {"top2": cx.top_k(2, ignore_index=index)}
        ours |= {name: each[name] for name in ("recall_dog", "precision_cow")}
        ours |= {"f1": cx.F1(C, ignore_index=index), "ppl": cx.Perplexity(ignore_index=index)}
        ours["auc"] = cx.AUC(positive=2, ignore_index=index)
        return cx.Metrics(ours, ignore_index=index)

    kept = np.arange(N) % 3 != 0
    theirs = measured(own(None), LOGITS[kept], LABELS[kept], [9])
    for code, ignore_index in ((-1, -1), (-100, None), (9, 9)):
        assert measured(own(ignore_index), LOGITS, np.where(kept, LABELS, code), [9]) == pytest.approx(
            theirs, nan_ok=True
        ), code


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_is_scikit_learn_s_over_any_split(average):
    found = measured(cx.F1(C, average), LOGITS, LABELS)["it"]
    assert found == pytest.approx(sk.f1_score(LABELS, LOGITS.argmax(-1), average=average))


def test_f1_of_each_class_and_of_a_sign():
    each = sk.f1_score(LABELS, LOGITS[:, :3].argmax(-1), average=None)
    found = measured(cx.F1(3, None), LOGITS[:, :3], LABELS)
    assert [found[f"it_{label}"] for label in range(3)] == pytest.approx(each)
    for output in (SCORES, SCORES[:, None]):
        assert measured(cx.F1(2, "binary"), output, BINARY)["it"] == pytest.approx(
            sk.f1_score(BINARY, SCORES > 0)
        )


def test_a_confusion_matrix_is_counted_and_what_is_ignored_is_not():
    labels = np.where(np.arange(N) % 5 == 0, -100, LABELS)
    found = measured(cx.ConfusionMatrix(C, ignore_index=-100), LOGITS, labels)["it"]
    kept = labels >= 0
    np.testing.assert_array_equal(
        found, sk.confusion_matrix(LABELS[kept], LOGITS.argmax(-1)[kept], labels=range(C))
    )
    # With a custom loss a label may not be a class: it is in no row, also not in the last one (-1).
    assert measured(cx.ConfusionMatrix(C), LOGITS, labels)["it"].sum() == kept.sum()


def test_auc_is_exact_but_for_pairs_of_one_bin():
    exact = sk.roc_auc_score(BINARY, SCORES)
    assert measured(cx.AUC(100_000), SCORES, BINARY)["it"] == pytest.approx(exact, abs=1e-12)
    assert abs(measured(cx.AUC(), SCORES, BINARY)["it"] - exact) < 2e-3  # 1000 bins, 420 pairs
    two = np.stack([np.zeros_like(SCORES), SCORES], 1)
    for labels in (BINARY, BINARY[:, None]):
        assert measured(cx.AUC(100_000), two, labels)["it"] == pytest.approx(exact, abs=1e-12)
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    of_2 = sk.roc_auc_score(LABELS == 2, probability[:, 2])
    assert measured(cx.AUC(100_000, positive=2), LOGITS, LABELS)["it"] == pytest.approx(of_2, abs=1e-12)
    assert np.isnan(measured(cx.AUC(), SCORES, np.ones(N, np.int32))["it"])


def test_perplexity_and_bits_are_of_the_mean_over_tokens():
    log_p = np.asarray(jax.nn.log_softmax(TEXT))
    nll = -np.take_along_axis(log_p, TOKENS[..., None], -1)[..., 0]
    assert measured(cx.Perplexity(), TEXT, TOKENS)["it"] == pytest.approx(np.exp(nll.mean()), rel=1e-6)
    counts = TOKENS != 0
    some = measured(cx.BitsPerCharacter(4.0, ignore_index=0), TEXT, TOKENS)["it"]
    assert some == pytest.approx(nll[counts].mean() / np.log(2) / 4, rel=1e-6)
    assert np.isnan(measured(cx.Perplexity(), TEXT, np.full_like(TOKENS, -1))["it"])  # -1 is not a class


def test_r2_is_scikit_learn_s_and_nan_where_float32_cannot_tell():
    guess = REAL + rng.normal(size=REAL.shape).astype(np.float32) / 4
    found = measured(cx.R2(2, around=1e4), guess, REAL)["it"]
    assert found == pytest.approx(sk.r2_score(REAL, guess), rel=1e-4)
    assert measured(cx.R2(), guess[:, 0] - 1e4, REAL[:, 0] - 1e4)["it"] == pytest.approx(
        sk.r2_score(REAL[:, 0], guess[:, 0]), rel=1e-3
    )
    assert np.isnan(measured(cx.R2(2), guess, REAL)["it"])  # spread 1 around 10,000


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cx.F1(3, "binary"), ConfigError, r"F1\(3, average='binary'\).*HINT"),
        (lambda: measured(cx.F1(3), TEXT, LABELS[:9]), DataError, "HINT"),
        (lambda: measured(cx.AUC(), LOGITS, LABELS), DataError, "4.*positive"),
        (lambda: cx.F1(3).update(0.0, LOGITS, {"label": LABELS}, np.ones(N)), DataError, "dict.*Task"),
        # jax's own errors
        (lambda: measured(cx.AUC(positive=1), TEXT, LABELS[:9]), (TypeError, ValueError), None),
        (lambda: measured(cx.R2(), TEXT, LABELS[:9]), (TypeError, ValueError), None),
        (lambda: measured(cx.Perplexity(), TEXT, LABELS[:9]), (TypeError, ValueError), None),
    ],
)
def test_what_does_not_fit_is_one_line(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "metric",
    [
        cx.F1(C)._replace(merge=jnp.maximum),
        cx.F1(C)._replace(init=lambda: jnp.zeros(2)),
        cx.Perplexity()._replace(init=lambda: jnp.zeros((2, 1))),
    ],
    ids=["a maximum", "too few numbers", "another shape"],
)
def test_what_does_not_add_up_is_refused_before_training(metric):
    with pytest.raises((ConfigError, ValueError), match="it|rank|unpack"):
        trainer(linen.Dense(C), metrics=cx.Metrics({"it": metric})).fit(LOGITS, LABELS, config())
