"""Parameters of every kind and place, cut over replicas that divide none of them: the numbers of `mean`."""

import jax
import numpy as np
import pytest

from tests.support.sharded import CLOSE, MODELS, assert_same, trained

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def on_three(comm, model):
    # 16 samples a step do not divide either, so 15.
    return trained(comm, model, 3, epochs=1, global_batch_size=15)


@pytest.mark.parametrize(
    ("comm", "model"),
    [
        ("fsdp", "crossed"),
        *(
            pytest.param(*row, marks=SLOW)
            for row in [("zero1", "crossed"), ("fsdp", "shared"), ("fsdp", "pair")]
        ),
    ],
)
def test_every_kind_of_leaf_is_trained_as_by_mean(comm, model):
    one, other = on_three(comm, model), on_three("mean", model)
    assert_same(one, other)
    inputs = MODELS[model][1][0]
    np.testing.assert_allclose(one.predict(inputs), other.predict(inputs), **CLOSE)
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), trainer.params) for trainer in (one, other)]
    assert kinds[0] == kinds[1]
