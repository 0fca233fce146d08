"""Ready metrics against scikit-learn's, however the samples are dealt out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import ConfigError
from tests.support import sklearn_metrics as sk

rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(40, 4)).astype(np.float32)
LABELS = rng.integers(0, 4, 40).astype(np.int32)
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
    found = measured(cx.Metrics({"top2": cx.top_k(2), **cx.per_class(NAMES)}), LOGITS, LABELS, cuts)
    guess = LOGITS.argmax(-1)
    assert found["top2"] == pytest.approx(sk.top_k_accuracy_score(LABELS, LOGITS, k=2))
    for name, r, p in zip(
        NAMES,
        sk.recall_score(LABELS, guess, average=None),
        sk.precision_score(LABELS, guess, average=None),
        strict=True,
    ):
        assert (found[f"recall_{name}"], found[f"precision_{name}"]) == (pytest.approx(r), pytest.approx(p))


@pytest.mark.parametrize(("code", "ignore_index"), [(-1, -1), (-100, None), (9, 9)])
def test_what_is_ignored_or_below_0_counts_nowhere(code, ignore_index):
    labels = np.where(np.arange(40) % 3 == 0, code, LABELS)
    own = {"top2": cx.top_k(2, ignore_index=ignore_index), **cx.per_class(NAMES, ignore_index=ignore_index)}
    own |= {"f1": cx.F1(4, ignore_index=ignore_index), "ppl": cx.Perplexity(ignore_index=ignore_index)}
    metrics = cx.Metrics(own, ignore_index=ignore_index)
    kept = labels != code
    plain = cx.Metrics({"top2": cx.top_k(2), **cx.per_class(NAMES), "f1": cx.F1(4), "ppl": cx.Perplexity()})
    ours, theirs = measured(metrics, LOGITS, labels, [9]), measured(plain, LOGITS[kept], LABELS[kept], [9])
    assert ours == pytest.approx(theirs)


def test_a_class_without_samples_is_nan_and_no_top_is_refused():
    found = measured(cx.Metrics(cx.per_class(NAMES)), LOGITS, np.zeros(40, np.int32), [])
    assert np.isnan(found["recall_dog"])
    assert found["precision_dog"] == 0
    with pytest.raises(ConfigError, match=r"top_k\(4\) .*3 classes"):
        cx.top_k(4)(np.zeros((2, 3), np.float32), np.zeros(2, np.int32))
    assert jax.tree.leaves(cx.per_class([])) == []
