"""What the cricket-GNN guide documents: one script, alone and as two ranks, with the same results."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.config.experiment import TrainConfig
from cyxjax.distributed import process_group
from cyxjax.launch import environment
from cyxjax.launch.environment import collective_timeout_s
from cyxjax.launch.options import parse
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.sinks import NullSink, build_sinks
from tests.guides import program_cricket as program
from tests.support.programs import ROOT, launch, run
from tests.support.trainers import use_devices

pytestmark = pytest.mark.multiprocess
dist = cx.distributed
SCRIPT = ROOT / "scripts" / "train_minimal.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    done = run(str(SCRIPT), "--epochs", "2", "--batch-size", "64", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    flags = ["--nnodes=1", "--nproc_per_node=2", "--node_rank=0", "--master_addr=127.0.0.1"]
    options = ["--epochs", "2", "--batch-size", "32", "--out", str(folder)]
    done = run("-m", "cyxjax.launch", *flags, str(SCRIPT), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(Path(program.__file__), tmp_path_factory.mktemp("cricket"))


def test_one_process_still_trains(alone):
    folder, printed = alone
    assert "Process 0/1 started (local rank 0)" in printed
    assert "Batch plan: 64 samples x 1 replica x 1 accumulation = 64 per step" in printed
    assert (folder / "model.cyxmodel").is_file()


def test_metrics_of_two_ranks_are_those_of_one(alone, two_ranks):
    one, two = (DistributedTrainingHistory.load(folder / "history.json") for folder, _ in (alone, two_ranks))
    assert one.effective_batch_size == two.effective_batch_size == 64  # batch per replica x replicas
    assert (one.world_size, two.world_size) == (1, 2)
    # Sums over replicas in another order; Adam's first steps carry the rounding on.
    np.testing.assert_allclose(two.train_losses, one.train_losses, rtol=1e-3)
    np.testing.assert_allclose(two.val_losses, one.val_losses, rtol=1e-3)


def test_only_rank_zero_prints_progress(two_ranks):
    printed = two_ranks[1]
    assert printed.count("Process 0/2 started") == printed.count("Process 1/2 started") == 1
    assert "[rank 0] Epoch 1/" in printed
    assert "[rank 1] Epoch" not in printed
    assert len(re.findall(r"Test loss \d+\.\d{4}, accuracy", printed)) == 1


def test_checkpoints_of_two_ranks_are_loaded_by_one(two_ranks, tmp_path):
    folder = two_ranks[0]
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    done = run(str(SCRIPT), "--epochs", "3", "--batch-size", "64", "--out", str(again))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Resuming from step" in done.stdout  # one process, the same batch: the third epoch is trained
    assert len(DistributedTrainingHistory.load(again / "history.json").train_losses) == 3


def test_the_place_is_found_in_the_environment(ranks):
    assert [r["place"] for r in ranks.reports] == [[0, 0, 2], [1, 1, 2]]
    assert [r["main"] for r in ranks.reports] == [True, False]


def test_metrics_are_averaged_over_ranks(ranks):
    assert ranks.every("mean") == 0.5  # of the ranks' own numbers, 0 and 1
    assert ranks.every("mean_of_many") == [[0.5, 1.5], 2.5]


def test_loaders_of_all_ranks_share_out_the_data(ranks):
    train = [set(r["train"]) for r in ranks.reports]
    assert not train[0] & train[1]
    assert len(train[0]) == len(train[1]) == 10  # 21 samples, drop_last
    val = [r["val"] for r in ranks.reports]
    assert sorted(val[0] + val[1]) == list(range(21))  # nothing dropped or counted twice
    assert ranks.reports[0]["orders_differ"]


def test_rank_zero_saves_alone_and_a_barrier_holds_the_others(ranks):
    assert all(r["found_after_barrier"] for r in ranks.reports)
    losses = ranks.every("loaded")
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_without_torchrun_s_variables_it_is_one_process():
    process_group.finalize()
    try:
        assert dist.setup_distributed() == (0, 0, 1)
        assert dist.is_main_process()
        assert float(dist.reduce_tensor(np.float32(3.5))) == 3.5
        dist.barrier()
    finally:
        dist.cleanup()


@pytest.mark.parametrize(
    ("platform", "has_gpu", "chosen"),
    [
        ("linux", True, "nccl"), ("linux", False, "gloo"), ("darwin", True, "nccl"),
        ("darwin", False, "gloo"), ("win32", True, "gloo"), ("win32", False, "gloo"),
    ],
)  # fmt: skip
def test_the_backend_follows_platform_and_hardware(platform, has_gpu, chosen):
    assert environment.choose("auto", platform, has_gpu) == chosen


def test_processes_that_gain_nothing_are_advised():
    assert "no parallel benefit" in environment.advice("gloo", "darwin", 2, 2)
    assert "no parallel benefit" in environment.advice("gloo", "linux", 4096, 4096)
    assert environment.advice("gloo", "darwin", 1, 1) is None


def test_several_nodes_by_torchrun_s_flags():
    flags = ["--nnodes=2", "--nproc_per_node=4", "--node_rank=1", "--master_addr=192.168.1.100"]
    place = parse([*flags, "--master_port=29500", __file__], {}).place
    assert (place.base_rank, place.nproc, place.world_size) == (4, 4, 8)
    assert (place.master_addr, place.master_port) == ("192.168.1.100", 29500)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_the_learning_rate_follows_the_effective_batch(rule, factor):
    # 2 replicas x 16 = 32 per step, chosen for 8: four times as large.
    use_devices(2)
    try:
        X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
        model = cx.SequentialModel([cx.LinearModule(4, 2)])
        trainer = dist.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.01))
        scaled = {} if rule == "none" else {"lr_scaling": rule, "base_batch_size": 8}
        quiet = {"epochs": 1, "verbose": False, "checkpoint_every_n_epochs": 0}
        config = dist.DistributedTrainingConfig(batch_size=16, **quiet, **scaled)
        history = trainer.fit(X, np.zeros(32, np.int32), config)
    finally:
        process_group.finalize()
    assert history.learning_rates == [pytest.approx(0.01 * factor)]


def test_trackers_open_on_rank_zero_only(tmp_path):
    assert isinstance(build_sinks(["wandb"], tmp_path, is_master=False), NullSink)
    assert list(tmp_path.iterdir()) == []
    assert TrainConfig(sinks=("wandb",), wandb={"init_timeout": 300.0}).wandb.init_timeout == 300.0
    assert TrainConfig().wandb.init_timeout == 120.0


def test_nccl_s_timeout_is_honoured():
    assert collective_timeout_s({"NCCL_TIMEOUT": "1800"}) == 1800
