"""Losses with torch's names, compared with torch's formulas; an invalid argument is a one-line error."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.rows import check_form
from cyxjax.errors import DataError

LOGITS = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 3, (4, 5)).astype(np.int32)
WEIGHT = np.float32([1, 3, 0.5])


def by_torch(weight, smoothing, counts):
    """torch's documented cross entropy, reduction "mean": divided by label weights, smoothing by class."""
    log_p = np.asarray(LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True)))
    w = weight[LABELS] * counts
    own = -np.take_along_axis(log_p, LABELS[..., None], -1)[..., 0]
    spread = -(weight * log_p).sum(-1) * counts
    return ((1 - smoothing) * w * own + smoothing / 3 * spread).sum() / w.sum()


BELOW_0 = np.float32([1, -3, 0.7])


@pytest.mark.parametrize(
    ("weight", "smoothing", "ignore_index"),
    [
        *[(None, 0.0, None), (WEIGHT, 0.3, None), (BELOW_0, 0.0, None), (BELOW_0, 0.3, None)],
        *itertools.product((None, WEIGHT), (0.0, 0.3), (1,)),
    ],
)
def test_cross_entropy_is_torch_s(weight, smoothing, ignore_index):
    counts = np.ones(LABELS.shape) if ignore_index is None else (ignore_index != LABELS)
    loss = cx.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, ignore_index=ignore_index)
    expected = by_torch(np.ones(3) if weight is None else weight, smoothing, counts.astype(np.float32))
    np.testing.assert_allclose(loss(LOGITS, LABELS), expected, rtol=1e-6)
    grads = loss.backward(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    assert np.isfinite(grads).all()
    assert (np.asarray(grads)[counts == 0] == 0).all()


@pytest.mark.parametrize("options", [{}, {"ignore_index": -100}, {"weight": WEIGHT}])
def test_a_class_that_the_model_excludes_has_probability_0(options):
    loss, excluded = cx.CrossEntropyLoss(**options), np.eye(3, dtype=bool)[(LABELS + 1) % 3]
    logits, low = (np.where(excluded, value, LOGITS) for value in (-np.inf, np.float32(-1e9)))
    assert loss(logits, LABELS) == loss(low, LABELS)
    assert (loss.backward(logits, LABELS) == loss.backward(low, LABELS)).all()


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
    # Unlike torch, which keeps the smoothing term of labels whose class has weight 0.
    left_out, weighed = cx.CrossEntropyLoss((1, 1, 0), 2, 0.3), cx.CrossEntropyLoss((1, 1, 0), None, 0.3)
    assert left_out(LOGITS, LABELS) == weighed(LOGITS, LABELS)


TWO = np.log(np.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], np.float32))


def values(value):
    """(their sum, the contribution of each sample to it), for (value, weight) or a value."""
    each = value[0] * value[1] if isinstance(value, tuple) else value
    return each.sum(), each


NO_CLASS = [(-1, jnp.int32), (250, jnp.uint8), (-100, jnp.int8), (3, jnp.int32)]
OTHERS = [
    cx.CrossEntropyLoss(label_smoothing=0.1),
    cx.CrossEntropyLoss(weight=[1, 2, 3], ignore_index=-6),  # as int8, 250 is -6
    cx.NLLLoss(),
]


@pytest.mark.parametrize(
    ("loss", "label", "dtype"),
    [
        *((cx.CrossEntropyLoss(), *wrong) for wrong in NO_CLASS),
        *((loss, *wrong) for loss in OTHERS for wrong in NO_CLASS[:2]),
    ],
)
def test_a_label_that_is_no_class_is_not_counted_from_the_end(loss, label, dtype):
    each = lambda logits, labels: values(loss.per_example(logits, labels))  # noqa: E731
    run = jax.jit(jax.grad(each, has_aux=True))
    (grads, right), (_, wrong) = (
        jax.device_get(run(TWO, np.array(labels, dtype))) for labels in ([2, 0], [2, label])
    )
    assert right[0] == wrong[0]
    assert np.isfinite(right).all()
    assert np.isnan(wrong[1])
    assert np.isfinite(grads).all()


def test_the_last_of_many_classes_is_one():
    labels = np.array([127, -1], np.int8)
    found = jax.jit(cx.CrossEntropyLoss().per_example)(np.zeros((2, 200), np.float32), labels)
    assert [np.isfinite(found[0]), np.isnan(found[1])] == [True, True]


@pytest.mark.parametrize(
    "loss", [cx.MSELoss(), cx.L1Loss(), cx.HuberLoss(), cx.CrossEntropyLoss(), cx.BCEWithLogitsLoss()]
)
def test_what_would_broadcast_or_lose_a_part_is_refused_with_both_shapes(loss):
    real = jnp.ones((2, 3))
    column = jnp.ones((2, 1), jnp.int32)
    for output, target in (
        (real.astype(jnp.complex64), real),
        (real, real.astype(jnp.complex64)),
        (real, column),
        (real[:, :1], real[:, 0]),
        (real[:, 0], real[:, :1]),
        ({}, real),
    ):
        with pytest.raises(DataError, match=f"{type(loss).__name__}: .*output.*target.*HINT"):
            jax.eval_shape(loss.per_example, output, target)


@pytest.mark.parametrize("target", [jnp.zeros(2, jnp.int32), jnp.ones((2, 1))])
def test_a_single_class_is_refused_as_its_loss_is_always_zero(target):
    with pytest.raises(DataError, match="CrossEntropyLoss.*BCEWithLogitsLoss"):
        jax.eval_shape(cx.CrossEntropyLoss().per_example, jnp.ones((2, 1)), target)


@pytest.mark.parametrize(
    "value",
    [None, {"loss": 1}, (jnp.ones(2), {"aux": 1}), (jnp.ones(2),) * 3, jnp.ones(3)],
)
def test_a_loss_gives_a_number_or_a_row_per_sample(value):
    with pytest.raises(DataError, match=r"loss .*2.*\(2, \.\.\.\)"):
        check_form(value, 2, "the loss")
    for good in (jnp.ones(()), jnp.ones((2, 4)), (jnp.ones(2), jnp.ones(2))):
        check_form(good, 2, "the loss")
    with pytest.raises(DataError, match="loss .*complex64"):
        check_form(jnp.ones(2, jnp.complex64), 2, "the loss")


def test_the_gradient_of_l1_where_it_is_0_is_torch_s():
    given, target = jnp.array([1.0, 2.0, -3.0, jnp.inf]), jnp.array([1.0, 0.0, 0.0, 0.0])
    assert cx.L1Loss().backward(given, target).tolist() == [0.0, 0.25, -0.25, 0.25]
    assert cx.L1Loss().forward(given[:3], target[:3]) == pytest.approx(5 / 3)
