"""A label that is no class is never counted from the end, nor as nothing: its loss is not a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.core.losses import CrossEntropyLoss, NLLLoss

LOGITS = np.log(np.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], np.float32))


def values(given):
    """Of a loss that weighs its samples, what they add to its sum."""
    return given[0] * given[1] if isinstance(given, tuple) else given


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropyLoss(),
        CrossEntropyLoss(label_smoothing=0.1),
        CrossEntropyLoss(weight=[1, 2, 3], ignore_index=7),
        NLLLoss(),
    ],
)
@pytest.mark.parametrize("label", [-1, -100, 3])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
def test_a_label_that_is_no_class(loss, label, dtype):
    logits, good, bad = jnp.asarray(LOGITS), jnp.array([2, 0], dtype), jnp.array([2, label], dtype)
    run = jax.jit(lambda logits, labels: values(loss.per_example(logits, labels)))
    right, wrong = (run(logits, labels) for labels in (good, bad))
    assert right[0] == wrong[0]
    assert np.isfinite(right).all()
    assert np.isnan(wrong[1])
    assert np.isfinite(jax.jit(jax.grad(lambda x: run(x, good).sum()))(logits)).all()


def test_the_last_of_many_classes_is_one():
    logits = jnp.zeros((1, 200))
    assert np.isfinite(CrossEntropyLoss().per_example(logits, jnp.array([127], jnp.int8)))
    assert np.isnan(CrossEntropyLoss().per_example(logits, jnp.array([-1], jnp.int8)))
