"""Metrics are sums and counts over real samples: exact over any split of the data, as scikit-learn's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.metrics import Metrics, metrics_of
from cyxjax.errors import ConfigError
from tests.support import sklearn_metrics as sk

LOGITS = jnp.array([[2.0, 0.0], [0.0, 3.0], [5.0, 0.0], [0.0, 0.0]], jnp.float32)
LABELS = jnp.array([0, 1, 1, 0], jnp.int32)


def test_sums_and_counts_by_hand():
    # Of the three samples that weigh 1 two are right; losses 1 + 2 + 4; the fourth row is padding.
    weight = jnp.array([1, 1, 1, 0], jnp.float32)
    losses = jnp.array([1.0, 2.0, 4.0, 8.0], jnp.float32)
    metrics = Metrics({"first": lambda output, target: output[:, 0], "none": lambda output, target: None})
    sums = np.asarray(metrics.sums(losses, LOGITS, LABELS, weight))
    assert metrics.names == ("loss", "accuracy", "first", "none")
    assert sums.tolist() == [[7, 3], [2, 3], [7, 3], [0, 0]]
    means = metrics.means(sums)
    assert means["loss"] == np.float32(7) / np.float32(3)
    assert np.isnan(means["none"])


def test_what_padding_holds_is_not_measured():
    # 0 * NaN is NaN: a padding row's output may be anything.
    weight = jnp.array([1, 1, 1, 0], jnp.float32)
    losses = jnp.array([1.0, 2.0, 4.0, jnp.nan], jnp.float32)
    assert np.asarray(Metrics().sums(losses, LOGITS, LABELS, weight))[0].tolist() == [7, 3]


def test_labels_below_0_are_padding_and_one_output_is_no_class():
    # Of the labels 0, 1 and 0 the first two are found; positions below 0 are padding of the user's own loss.
    labels, losses, weight = jnp.array([0, 1, -1, 0]), jnp.ones(4), jnp.ones(4)

    def accuracy(logits, labels):
        return np.asarray(Metrics().sums(losses, logits, labels, weight))[1].tolist()

    assert accuracy(LOGITS.at[3].set(jnp.array([0.0, 1.0])), labels) == [2, 3]
    assert accuracy(LOGITS[:, None], jnp.array([[0], [1], [-100], [0]])) == [3, 3]
    assert accuracy(LOGITS[:, :1], labels) == [0, 0]


def test_metrics_that_are_no_metrics_are_refused():
    for own, better in (
        ({"loss": len}, {}),
        ({"top2": len}, {"top2": "maximize"}),
        ({"top2": len}, {"top": "max"}),
    ):
        with pytest.raises(ConfigError, match="'loss'.*'min' or 'max'"):
            Metrics(own, better=better)
    with pytest.raises(ConfigError, match=r"cx\.Metrics.*list"):
        metrics_of(None, ["accuracy"])
    with pytest.raises(ConfigError, match="Width"):
        Metrics(Width)
    with pytest.raises(ConfigError, match=r"'w'.*\(1,\).*\(3,\)"):
        Metrics({"w": Width}).sums(jnp.ones(2), jnp.ones((2, 1)), jnp.zeros(2, jnp.int32), jnp.ones(2))


class Width(NamedTuple):
    """A metric class whose state has a number for each output."""

    sums: Any

    @classmethod
    def from_model_output(cls, logits, labels):
        return cls(logits.sum(0))

    @classmethod
    def empty(cls):
        return cls(jnp.zeros(3))

    def merge(self, other):
        return Width(self.sums + other.sums)

    def compute(self):
        return self.sums.sum()


rng = np.random.default_rng(0)
SAMPLES = rng.normal(size=(40, 4)).astype(np.float32)
CLASSES = rng.integers(0, 4, 40).astype(np.int32)
NAMES = ["cat", "dog", "cow", "hen"]


def measured(metrics, logits, labels, cuts):
    """Means after sums over parts of the samples, as replicas make them; the last row is padding."""
    total, sums = np.zeros((metrics.num_rows, 2)), jax.jit(metrics.sums)
    for rows in np.split(np.arange(len(labels)), cuts):
        o, t = (np.concatenate([a[rows], a[:1]]) for a in (logits, labels))
        weight = jnp.float32([1] * len(rows) + [0])
        total += np.asarray(sums(jnp.zeros(len(o)), jnp.asarray(o), jnp.asarray(t), weight))
    return metrics.means(total)


@pytest.mark.parametrize("cuts", [[], [7, 30], [1, 2, 3]])
def test_they_are_scikit_learn_s_over_any_split(cuts):
    found = measured(cx.Metrics({"top2": cx.top_k(2), **cx.per_class(NAMES)}), SAMPLES, CLASSES, cuts)
    guess = SAMPLES.argmax(-1)
    assert found["top2"] == pytest.approx(sk.top_k_accuracy_score(CLASSES, SAMPLES, k=2))
    for name, r, p in zip(
        NAMES,
        sk.recall_score(CLASSES, guess, average=None),
        sk.precision_score(CLASSES, guess, average=None),
        strict=True,
    ):
        assert (found[f"recall_{name}"], found[f"precision_{name}"]) == (pytest.approx(r), pytest.approx(p))


@pytest.mark.parametrize(("code", "ignore_index"), [(-1, -1), (-100, None), (9, 9)])
def test_what_is_ignored_or_below_0_counts_nowhere(code, ignore_index):
    labels = np.where(np.arange(40) % 3 == 0, code, CLASSES)
    own = {"top2": cx.top_k(2, ignore_index=ignore_index), **cx.per_class(NAMES, ignore_index=ignore_index)}
    own |= {"f1": cx.F1(4, ignore_index=ignore_index), "ppl": cx.Perplexity(ignore_index=ignore_index)}
    metrics = cx.Metrics(own, ignore_index=ignore_index)
    kept = labels != code
    plain = cx.Metrics({"top2": cx.top_k(2), **cx.per_class(NAMES), "f1": cx.F1(4), "ppl": cx.Perplexity()})
    ours, theirs = measured(metrics, SAMPLES, labels, [9]), measured(plain, SAMPLES[kept], CLASSES[kept], [9])
    assert ours == pytest.approx(theirs)


def test_a_class_without_samples_is_nan():
    found = measured(cx.Metrics(cx.per_class(NAMES)), SAMPLES, np.zeros(40, np.int32), [])
    assert np.isnan(found["recall_dog"])
    assert found["precision_dog"] == 0
