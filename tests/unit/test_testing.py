"""`cx.testing`: equal runs pass, differences are named, and the results of ranks are returned."""

import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.errors import DesyncError, GroupError
from tests.multiprocess.conftest import forked_spawn as forked_spawn
from tests.support.models import CLASSES, FEATURES, NnxNet, data

LOSS = cx.CrossEntropyLoss()
FEW = data(20)
ALIKE = {"steps": 2, "sync_batchnorm": True, "steps_per_dispatch": 1}


def sequential():
    layers = [cx.LinearModule(FEATURES, 8), cx.BatchNormModule(8), cx.ReLUModule()]
    return cx.SequentialModel([*layers, cx.LinearModule(8, CLASSES)])


def test_a_model_that_trains_alike_passes(group):
    # The second step has 5 of 8 rows, on 2 + 2 + 1 + 0 of the replicas: means of means would differ.
    cx.testing.check_replicas(sequential(), LOSS, data(13), replicas=4, **ALIKE)
    assert not process_group.is_initialized()


def test_a_model_that_holds_values_is_not_changed(group):
    model = NnxNet(nnx.Rngs(0))
    before = np.array(model.first.kernel[...])
    cx.testing.check_replicas(model, LOSS, FEW, replicas=2, **ALIKE)
    assert (np.array(model.first.kernel[...]) == before).all()


def test_statistics_of_a_share_are_found(group):
    with pytest.raises(AssertionError, match="2 devices .*sync_batchnorm=True"):
        cx.testing.check_replicas(
            sequential(), LOSS, data(13), replicas=2, **ALIKE | {"sync_batchnorm": False}
        )


def test_a_block_has_its_devices_and_ends(group):
    with cx.testing.devices(3):
        assert cx.distributed.get_num_replicas() == 3
    with (
        pytest.raises(GroupError, match="99 devices .*8 "),
        cx.testing.devices(99),
    ):
        pass
    assert not process_group.is_initialized()


def from_row(first):
    """A loader of five rows."""
    return cx.data.Batches([FEW.inputs[first : first + 3], FEW.inputs[first + 3 : first + 5]])


def two_ranks(factor):
    trainer = cx.distributed.DistributedTrainer(linen.Dense(1), cx.MSELoss(), optax.sgd(0.1))
    with pytest.raises(DesyncError) as caught:
        trainer.predict(from_row(cx.distributed.get_rank()))
    return {
        "rank": cx.distributed.get_rank() * factor,
        "rows": trainer.predict(from_row(0)),
        "whole": trainer.predict(FEW.inputs[:5]),
        "half": jnp.array([[1.5], [-2]], jnp.bfloat16),
        "said": [str(caught.value)],
        "replicas": cx.distributed.get_num_replicas(),
    }


@pytest.mark.multiprocess
def test_ranks_return_what_they_found(forked_spawn):
    one, two = cx.testing.run_ranks(2, two_ranks, 10, devices=2)
    assert (one["rank"], two["rank"], two["replicas"]) == (0, 10, 4)
    assert one["rows"].shape == (5, 1)
    np.testing.assert_array_equal(one["rows"], two["rows"])
    assert (one["half"].dtype, one["half"].tolist()) == (jnp.bfloat16, [[1.5], [-2]])
    np.testing.assert_allclose(one["rows"], one["whole"], rtol=1e-6)
    assert "the loaders of the ranks give different samples" in one["said"][0]


def forever():
    signal.pause()


@pytest.mark.multiprocess
def test_a_rank_that_does_not_end_is_ended():
    with pytest.raises(GroupError, match="forever: .*0 s"):
        cx.testing.run_ranks(1, forever, timeout_s=0)
