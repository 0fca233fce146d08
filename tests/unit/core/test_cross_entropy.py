"""Losses by torch's names, against torch's formulas written out."""

import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx

LOGITS = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 3, (4, 5)).astype(np.int32)
WEIGHT = np.float32([1, 3, 0.5])


def by_torch(weight, smoothing, counts):
    """torch's documented cross entropy, reduction "mean": labels' weights divide, smoothing is by class."""
    log_p = np.asarray(LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True)))
    w = weight[LABELS] * counts
    own = -np.take_along_axis(log_p, LABELS[..., None], -1)[..., 0]
    spread = -(weight * log_p).sum(-1) * counts
    return ((1 - smoothing) * w * own + smoothing / 3 * spread).sum() / w.sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignore_index", [None, 1])
def test_cross_entropy_is_torch_s(weight, smoothing, ignore_index):
    counts = np.ones(LABELS.shape) if ignore_index is None else (ignore_index != LABELS)
    loss = cx.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, ignore_index=ignore_index)
    expected = by_torch(np.ones(3) if weight is None else WEIGHT, smoothing, counts.astype(np.float32))
    np.testing.assert_allclose(loss(LOGITS, LABELS), expected, rtol=1e-6)
    grads = loss.backward(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    assert np.isfinite(grads).all()
    assert (np.asarray(grads)[counts == 0] == 0).all()


def test_weights_of_probabilities_do_not_divide():
    # torch: -sum_c w_c t_c log p_c, averaged over samples.
    target = np.eye(3, dtype=np.float32)[LABELS]
    log_p = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    expected = -(WEIGHT * target * log_p).sum(-1).mean()
    np.testing.assert_allclose(cx.CrossEntropyLoss(weight=WEIGHT)(LOGITS, target), expected, rtol=1e-6)


def test_a_batch_in_which_nothing_counts_is_zero_and_has_no_gradient():
    loss = cx.CrossEntropyLoss(ignore_index=2)
    nothing = np.full(LABELS.shape, 2, np.int32)
    assert float(loss(LOGITS, nothing)) == 0
    assert not np.asarray(loss.backward(LOGITS, nothing)).any()
