"""Metrics are sums and counts over real samples."""

from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.metrics import GRAD_NORM, Metrics, metrics_of
from cyxjax.errors import ConfigError, DataError

LOGITS = jnp.array([[2.0, 0.0], [0.0, 3.0], [5.0, 0.0], [0.0, 0.0]], jnp.float32)
LABELS = jnp.array([0, 1, 1, 0], jnp.int32)


def test_sums_and_counts_by_hand():
    # Two of the three samples with weight 1 are correct; losses 1 + 2 + 4; the fourth row is padding, which
    # may hold anything: 0 * NaN is NaN.
    weight = jnp.array([1, 1, 1, 0], jnp.float32)
    losses = jnp.array([1.0, 2.0, 4.0, jnp.nan], jnp.float32)
    metrics = Metrics({"first": lambda output, target: output[:, 0], "none": lambda output, target: None})
    sums = np.asarray(metrics.sums(losses, LOGITS, LABELS, weight))
    assert metrics.names == ("loss", "accuracy", "first", "none")
    assert sums.tolist() == [[7, 3], [2, 3], [7, 3], [0, 0]]
    means = metrics.means(sums)
    assert means["loss"] == np.float32(7) / np.float32(3)
    assert np.isnan(means["none"])


def test_sums_of_a_metric_that_has_another_number_of_rows_are_not_taken():
    def metrics(bins):
        return Metrics({"auc": cx.AUC(bins, positive=1), "last": lambda output, target: output[:, 0]})

    then, now = metrics(10), metrics(20)
    sums = np.arange(2.0 * then.num_training_rows).reshape(-1, 2)
    found = dict(zip(now.row_names, now.arranged(sums, then.row_names).tolist(), strict=True))
    assert found == {
        "loss": [0, 1],
        "accuracy": [2, 3],
        "auc": [0, 0],
        "last": [*sums[-2]],
        GRAD_NORM: [*sums[-1]],
    }
    assert not now.arranged(sums, now.row_names).any()  # of a checkpoint that names no rows


def test_labels_below_0_are_padding_and_one_output_is_no_class():
    # Of the labels 0, 1 and 0 the first two are correct; labels below 0 are padding of the user's own loss.
    labels, losses, weight = jnp.array([0, 1, -1, 0]), jnp.ones(4), jnp.ones(4)

    def accuracy(logits, labels):
        return np.asarray(Metrics().sums(losses, logits, labels, weight))[1].tolist()

    assert accuracy(LOGITS.at[3].set(jnp.array([0.0, 1.0])), labels) == [2, 3]
    assert accuracy(LOGITS[:, None], jnp.array([[0], [1], [-100], [0]])) == [3, 3]
    assert accuracy(LOGITS[:, :1], labels) == [0, 0]
    # Each label counts once, whatever the length that samples are padded to.
    tokens = jnp.array([[0, 0], [1, -1], [-1, -1], [0, 0]])
    assert accuracy(jnp.stack([LOGITS, LOGITS], 1), tokens) == [5, 5]
    # A prediction of class 256 is not the label 0 of a small dtype.
    assert accuracy(jnp.eye(300)[jnp.array([256, 1, 2, 3])], jnp.array([0, 1, 2, 3], jnp.uint8)) == [3, 4]


@flax.struct.dataclass
class Sums:
    """A metric class as in clu or metrax: constructed from sums."""

    total: Any
    count: Any


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Metrics({"loss": len}), ConfigError, "'loss'.*'min' or 'max'"),
        (lambda: Metrics({"top2": len}, better={"top2": "maximize"}), ConfigError, "'loss'.*'min' or 'max'"),
        (lambda: Metrics({"top2": len}, better={"top": "max"}), ConfigError, "'loss'.*'min' or 'max'"),
        (lambda: metrics_of(None, ["accuracy"]), ConfigError, r"cx\.Metrics.*list"),
        (
            lambda: Metrics({"it": Sums}).sums(jnp.ones(4), LOGITS, LABELS, jnp.ones(4)),
            DataError,
            "'it' of 4 samples.*Sums",
        ),
    ],
)
def test_metrics_that_are_no_metrics_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
