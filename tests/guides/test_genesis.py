"""The Genesis guide; its `--gpus N --script` starts the program of test_tensorbrain."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import cyxjax as cx
from cyxjax.errors import GroupError

pytestmark = pytest.mark.multiprocess
dist = cx.distributed


class MyModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="output")(nn.relu(nn.Dense(32, name="linear")(x)))


def wrapped():
    return dist.DistributedDataParallel(
        MyModel(), device_ids=[0], find_unused_parameters=False, gradient_as_bucket_view=True
    )


@pytest.fixture
def world_of_one(own_group):
    dist.init_process_group(backend="gloo", world_size=1, rank=0)


def test_a_world_of_one_needs_no_launcher(world_of_one):
    ddp_model = wrapped()
    x = np.ones((8, 20), np.float32)
    assert ddp_model(x).shape == (8, 10)
    ddp_model.backward(np.ones((8, 10), np.float32))  # of output.sum()
    grads = ddp_model.sync_gradients()
    # d sum / d bias of the last layer: 8 rows of ones
    np.testing.assert_allclose(grads["output"]["bias"], np.full(10, 8.0))
    assert dist.get_num_replicas() == jax.device_count()
    assert float(dist.all_reduce(2.0)) == 2.0
    dist.barrier()


def test_nccl_that_is_not_there_says_so_in_the_words_the_guide_looks_for():
    with pytest.raises(RuntimeError, match="NCCL.*HINT: set DISTRIBUTED_BACKEND=cpu"):
        dist.init_process_group(backend="nccl", world_size=1, rank=0)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "call", [dist.get_rank, dist.get_world_size, dist.barrier, lambda: dist.broadcast(1.0), wrapped]
)
def test_before_init_every_call_names_init_process_group(call):
    with pytest.raises(GroupError, match=r"init_process_group"):
        call()


def test_init_twice_is_refused_and_destroy_twice_is_not(world_of_one):
    with pytest.raises(GroupError, match="already initialized.*destroy_process_group"):
        dist.init_process_group(world_size=1, rank=0)
    dist.destroy_process_group()
    dist.destroy_process_group()


def test_model_and_data_meet_on_the_process_s_own_devices(world_of_one):
    elsewhere = jax.device_put(np.ones((8, 20), np.float32), jax.devices()[-1])
    assert wrapped()(elsewhere).shape == (8, 10)  # data is moved from any device
