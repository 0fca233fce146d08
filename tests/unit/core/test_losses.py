"""A label that is no class is never counted from the end, nor as nothing: its loss is not a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.core.losses import CrossEntropyLoss, NLLLoss

LOGITS = np.log(np.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], np.float32))


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), CrossEntropyLoss(label_smoothing=0.1), NLLLoss()])
@pytest.mark.parametrize("label", [-1, -100, 3])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
def test_a_label_that_is_no_class(loss, label, dtype):
    logits, good, bad = jnp.asarray(LOGITS), jnp.array([2, 0], dtype), jnp.array([2, label], dtype)
    right, wrong = loss.per_example(logits, good), loss.per_example(logits, bad)
    assert right[0] == wrong[0]
    assert np.isfinite(right).all()
    assert np.isnan(wrong[1])
    assert np.isfinite(jax.grad(lambda x: loss.per_example(x, good).sum())(logits)).all()


def test_the_last_of_many_classes_is_one():
    logits = jnp.zeros((1, 200))
    assert np.isfinite(CrossEntropyLoss().per_example(logits, jnp.array([127], jnp.int8)))
    assert np.isnan(CrossEntropyLoss().per_example(logits, jnp.array([-1], jnp.int8)))
