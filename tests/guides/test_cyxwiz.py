"""What the CyxWiz guide documents: two ranks started by hand run its program; the rest in this process."""

from pathlib import Path

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, GroupError
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
    assert [r["place"] for r in ranks.reports] == [[0, 2, 0], [1, 2, 1]]  # LOCAL_RANK: the same as RANK
    assert [r["master"] for r in ranks.reports] == [True, False]
    assert ranks.every("left")


def test_fit_gives_all_ranks_the_same_history(ranks):
    history = ranks.every("history")
    assert [len(history[curve]) for curve in ("train_losses", "train_accuracies")] == [3, 3]
    assert [len(history[curve]) for curve in ("val_losses", "val_accuracies")] == [3, 3]
    assert history["train_losses"][-1] < history["train_losses"][0]
    assert (history["effective_batch_size"], history["world_size"]) == (8, 2)
    assert history["num_steps"] == 3 * 6  # 45 of 50 samples, 8 a step
    assert all(value > 0 for r in ranks.reports for value in r["clock"])  # each rank's own clock
    assert len(ranks.every("with_validation")) == 3


def test_checkpoints_are_loaded_and_evaluated_alike(ranks, folder):
    assert ranks.every("loaded") == ranks.every("evaluated")
    assert any((folder / "checkpoints").iterdir())


def test_only_the_master_prints_and_saves_the_model(ranks, folder):
    assert ranks.printed.count("Epoch 3/3, Loss: ") == 2  # two fits, one rank
    assert "Batch plan: 4 samples x 2 replicas x 1 accumulation = 8 per step" in ranks.printed
    loaded = cx.SequentialModel.load(folder / "model.cyxmodel").eval()
    assert loaded(np.zeros((2, program.FEATURES), np.float32)).shape == (2, program.CLASSES)


def test_trainer_and_wrapper_say_who_they_are(ranks):
    assert [r["who"] for r in ranks.reports] == [r["ddp_who"] for r in ranks.reports]
    assert [r["who"] for r in ranks.reports] == [[True, 0, 2], [False, 1, 2]]
    assert ranks.every("same_model")


def test_accumulated_gradients_are_one_process_s_of_the_whole_batch(ranks):
    X, y = program.data()
    net, loss_fn = program.model(), cx.CrossEntropyLoss()
    process_group.finalize()
    dist.init(dist.DistributedConfig())
    try:
        ddp = dist.DistributedDataParallel(net)
        output = ddp.forward(X[:48])  # two ranks x two micro-batches x 12, all of equal weight
        ddp.backward(loss_fn.backward(output, y[:48]))
        whole = float(np.abs(ddp.sync_gradients()["0_linear"]["kernel"]).sum())
        ddp.update_parameters(cx.SGDOptimizer(0.1))
        bias = ddp.parameters()["2_linear"]["bias"]
    finally:
        dist.finalize()
    assert ranks.every("gradient") == pytest.approx(whole, rel=1e-5)  # the same sum in another order
    np.testing.assert_allclose(ranks.every("bias"), bias, rtol=1e-4, atol=1e-6)


def test_ranks_read_disjoint_samples_in_an_order_of_the_epoch(ranks):
    assert ranks.every("sizes") == [26, 51, 52, 3]
    assert ranks.every("dropped") == 25
    first, second = (sorted(sum((r["epochs"][e] for r in ranks.reports), [])) for e in range(2))
    assert len(first) == len(second) == 52
    assert set(first) == set(second) == set(range(51))  # one sample comes twice: the padding
    assert ranks.reports[0]["epochs"][0] != ranks.reports[0]["epochs"][1]


def test_defaults_of_the_environment(monkeypatch):
    found = str(dist.DistributedConfig.from_environment())
    place = "rank=0, world_size=1, local_rank=0, master_addr='127.0.0.1', master_port=29500, backend='auto'"
    assert place in found
    assert "timeout_ms=30000" in found
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        dist.init()
    given = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    for name, value in {**given, "DISTRIBUTED_BACKEND": "cpu", "DISTRIBUTED_TIMEOUT_MS": "5000"}.items():
        monkeypatch.setenv(name, value)
    found = str(dist.DistributedConfig.from_environment())
    assert "rank=3, world_size=4, local_rank=1, master_addr='10.0.0.1', master_port=1234" in found
    assert "timeout_ms=5000" in found


def test_a_group_from_a_configuration_with_a_backend():
    process_group.finalize()
    config = dist.DistributedConfig()
    config.rank, config.world_size, config.local_rank = 0, 1, 0
    config.master_addr, config.master_port, config.timeout_ms = "127.0.0.1", 29500, 30000
    config.backend = dist.BackendType.CPU
    try:
        dist.init(config)
        assert (dist.get_rank(), dist.get_world_size(), dist.is_master()) == (0, 1, True)
    finally:
        dist.finalize()
    with pytest.raises(GroupError, match="not initialized. HINT: call cx.distributed.init_process_group"):
        dist.get_rank()
