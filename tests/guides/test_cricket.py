"""What the cricket-GNN guide documents: one script, alone and as two ranks, with the same results."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.observe.history import DistributedTrainingHistory
from tests.guides import program_cricket as program
from tests.support.programs import ROOT, launch, run

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
