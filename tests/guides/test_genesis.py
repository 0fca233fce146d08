"""What the Genesis guide documents: its train.py under `--gpus N --script`, and the world of one."""

import re
from pathlib import Path

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, GroupError
from tests.guides import program_genesis as program
from tests.support.programs import launch, run

pytestmark = pytest.mark.multiprocess
dist = cx.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("genesis")
    return launch(Path(program.__file__), folder, "--gpus", "2", "--script")


@pytest.fixture
def world_of_one():
    process_group.finalize()
    dist.init_process_group(backend="gloo", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def test_the_launcher_s_own_spelling_starts_every_rank(ranks):
    started = re.findall(r"Process (\d)/(\d) started", ranks.printed)
    assert sorted(started) == [("0", "2"), ("1", "2")]


def test_the_group_is_there_until_it_is_destroyed(ranks):
    assert [r["rank"] for r in ranks.reports] == [0, 1]
    assert ranks.every("world_size") == 2
    assert ranks.every("up")
    assert ranks.every("down")


def test_the_loop_learns_and_ranks_stay_alike(ranks):
    for one in ranks.reports:
        assert one["losses"][-1] < one["losses"][0]
        assert one["output"] == [16, 10]
    assert ranks.reports[0]["losses"] != ranks.reports[1]["losses"]  # each has data of its own
    ranks.every("weights")


def test_only_the_main_rank_prints_in_the_guide_s_form(ranks):
    lines = re.findall(r"Epoch (\d), Loss: \d+\.\d{4}$", ranks.printed, re.MULTILINE)
    assert lines == [str(epoch) for epoch in range(10)]


def test_accumulation_in_mixed_precision_is_one_update(ranks):
    assert ranks.every("moved")
    ranks.every("after")
    assert ranks.every("scale") == 256.0


def test_collectives_return_their_results(ranks):
    assert ranks.every("reduced") == [[3.0] * 4, [2.0] * 4, [1.0] * 4]
    wanted = np.random.default_rng(0).normal(size=8).astype(np.float32)  # rank 0's draws
    np.testing.assert_array_equal(np.array(ranks.every("told"), np.float32), wanted)
    assert ranks.every("rows") == [0.0, 1.0]


def test_the_launcher_refuses_a_script_that_is_not_there(tmp_path):
    done = run("-m", "cyxjax.launch", "--gpus", "2", "--script", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "script 'nothing.py' does not exist" in done.stderr


def test_a_world_of_one_needs_no_launcher(world_of_one):
    import jax

    ddp_model = dist.DistributedDataParallel(program.MyModel(), device_ids=[0])
    x = np.ones((8, 20), np.float32)
    assert ddp_model(x).shape == (8, 10)
    ddp_model.backward(np.ones((8, 10), np.float32))  # of output.sum()
    grads = ddp_model.sync_gradients()
    # d sum / d bias of the last layer: 8 rows of ones
    np.testing.assert_allclose(grads["output"]["bias"], np.full(10, 8.0))
    assert dist.get_num_replicas() == jax.device_count()
    assert float(dist.all_reduce(2.0)) == 2.0
    assert dist.all_gather(x)[0].shape == x.shape
    dist.barrier()


def test_nccl_that_is_not_there_says_so_in_the_words_the_guide_looks_for():
    process_group.finalize()
    with pytest.raises(RuntimeError, match="NCCL") as caught:
        dist.init_process_group(backend="nccl", world_size=1, rank=0)
    assert "HINT: set DISTRIBUTED_BACKEND=cpu" in str(caught.value)
    assert not dist.is_initialized()


def test_before_init_every_call_names_init_process_group():
    process_group.finalize()
    assert not dist.is_initialized()
    for call in (dist.get_rank, dist.get_world_size, dist.barrier, lambda: dist.broadcast(1.0)):
        with pytest.raises(GroupError, match=r"init_process_group"):
            call()
    with pytest.raises(GroupError, match="init_process_group"):
        dist.DistributedDataParallel(program.MyModel())


def test_init_twice_is_refused_and_destroy_twice_is_not(world_of_one):
    with pytest.raises(GroupError, match="already initialized.*destroy_process_group"):
        dist.init_process_group(world_size=1, rank=0)
    dist.destroy_process_group()
    dist.destroy_process_group()


def test_model_and_data_meet_on_the_process_s_own_devices(world_of_one):
    import jax

    ddp_model = dist.DistributedDataParallel(program.MyModel())
    elsewhere = jax.device_put(np.ones((8, 20), np.float32), jax.devices()[-1])
    assert ddp_model(elsewhere).shape == (8, 10)  # data is moved, wherever it was
    with pytest.raises(ConfigError, match="device='cuda:0'.* cpu:0"):
        cx.Trainer(program.MyModel(), cx.SGDOptimizer(0.1), device="cuda:0")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world_size):
    process_group.finalize()
    with pytest.raises(ConfigError, match="HINT"):
        dist.init_process_group(backend="gloo", world_size=world_size, rank=rank)
