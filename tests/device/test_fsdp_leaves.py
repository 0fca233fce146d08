"""Parameters of every kind and place, cut over replicas that divide none of them: the numbers of `mean`."""

import numpy as np
import pytest

from tests.support.sharded import CLOSE, MODELS, assert_same, same_kinds, trained

pytestmark = pytest.mark.usefixtures("as_users_promote")


def on_three(comm, model):
    # 16 samples a step do not divide either, so 15.
    return trained(comm, model, 3, epochs=1, global_batch_size=15)


# By default: ("fsdp", "crossed") with more options, in test_fsdp.py.
@pytest.mark.slow
@pytest.mark.parametrize(("comm", "model"), [("zero1", "crossed"), ("fsdp", "shared"), ("fsdp", "pair")])
def test_every_kind_of_leaf_is_trained_as_by_mean(comm, model):
    one, other = on_three(comm, model), on_three("mean", model)
    assert_same(one, other)
    inputs = MODELS[model][1][0]
    np.testing.assert_allclose(one.predict(inputs), other.predict(inputs), **CLOSE)
    assert same_kinds(one, other)
