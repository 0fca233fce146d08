"""The CyxWiz guide: two ranks started by hand run its program; the other tests run in this process."""

from pathlib import Path

import numpy as np
import pytest

import cyxjax as cx
from tests.guides import program_cyxwiz as program
from tests.support.programs import by_hand

pytestmark = pytest.mark.multiprocess
dist = cx.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cyxwiz")


@pytest.fixture(scope="module")
def ranks(folder):
    return by_hand(Path(program.__file__), folder)


def test_terminals_with_rank_and_world_size_form_a_group(ranks):
    assert ranks.every("initialized")
    assert ranks.every("left")
    assert [r["place"] for r in ranks.reports] == [[0, 2, 0], [1, 2, 1]]  # LOCAL_RANK: the same as RANK
    assert [r["master"] for r in ranks.reports] == [True, False]
    # trainer and wrapper report their rank
    assert [r["who"] for r in ranks.reports] == [[True, 0, 2], [False, 1, 2]]
    assert [r["who"] for r in ranks.reports] == [r["ddp_who"] for r in ranks.reports]
    assert ranks.every("same_model")


def test_all_ranks_have_one_history_and_the_master_prints_and_saves(ranks, folder):
    history = ranks.every("history")
    curves = ("train_losses", "train_accuracies", "val_losses", "val_accuracies")
    assert [len(history[curve]) for curve in curves] == [3] * 4
    assert history["train_losses"][-1] < history["train_losses"][0]
    assert (history["effective_batch_size"], history["world_size"]) == (8, 2)
    assert history["num_steps"] == 3 * 6  # 45 of 50 samples, 8 per step
    assert all(value > 0 for r in ranks.reports for value in r["clock"])  # of each rank
    assert len(ranks.every("with_validation")) == 3
    assert ranks.every("loaded") == ranks.every("evaluated")
    assert any((folder / "checkpoints").iterdir())
    assert ranks.printed.count("Epoch 3/3, Loss: ") == 2  # two fits, one rank
    assert ranks.printed.count("Batch plan: 4 samples x 2 replicas x 1 accumulation = 8 per step") == 2
    loaded = cx.SequentialModel.load(folder / "model.cyxmodel").eval()
    assert loaded(np.zeros((2, program.FEATURES), np.float32)).shape == (2, program.CLASSES)


def test_accumulated_gradients_are_one_process_s_of_the_whole_batch(ranks):
    X, y = program.data()
    net, loss_fn = program.model(), cx.CrossEntropyLoss()
    dist.init(dist.DistributedConfig())
    ddp = dist.DistributedDataParallel(net)
    output = ddp.forward(X[:48])  # two ranks x two micro-batches x 12, all of equal weight
    ddp.backward(loss_fn.backward(output, y[:48]))
    whole = float(np.abs(ddp.sync_gradients()["0_linear"]["kernel"]).sum())
    ddp.update_parameters(cx.SGDOptimizer(0.1))
    bias = ddp.parameters()["2_linear"]["bias"]
    assert ranks.every("gradient") == pytest.approx(whole, rel=1e-5)  # the same sum in a different order
    np.testing.assert_allclose(ranks.every("bias"), bias, rtol=1e-4, atol=1e-6)


def test_a_configuration_is_that_of_the_environment_or_set_field_by_field(monkeypatch):
    alone = dist.DistributedConfig(0, 1, 0, "127.0.0.1", 29500, "auto", 30_000)
    assert dist.DistributedConfig.from_environment() == alone
    assert dist.DistributedConfig(local_rank=0) == alone
    assert (
        dist.DistributedConfig(1, 2).to_topology().local_world_size == 2
    )  # on loopback: both share the cores
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    variables |= {"MASTER_PORT": "1234", "DISTRIBUTED_BACKEND": "cpu", "DISTRIBUTED_TIMEOUT_MS": "5000"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = dist.DistributedConfig.from_environment()
    assert config == dist.DistributedConfig(3, 4, 1, "10.0.0.1", 1234, "gloo", 5000)
    config.rank, config.world_size, config.local_rank = 0, 1, 0
    config.master_addr, config.backend = "127.0.0.1", dist.BackendType.CPU
    dist.init(config)
    assert (dist.get_rank(), dist.get_world_size(), dist.is_master()) == (0, 1, True)
