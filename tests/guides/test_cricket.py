"""The cricket-GNN guide: one script, alone and as two ranks, with the same results."""

import re

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.observe.history import DistributedTrainingHistory
from tests.support.programs import ROOT, printed_by

pytestmark = pytest.mark.multiprocess
dist = cx.distributed
SCRIPT = ROOT / "scripts" / "train_minimal.py"


def trained(folder, *launcher, batch_size=64, epochs=2):
    """(history, output) of the script."""
    options = ["--epochs", str(epochs), "--batch-size", str(batch_size), "--out", str(folder)]
    printed = printed_by(*launcher, SCRIPT, *options)
    return DistributedTrainingHistory.load(folder / "history.json"), printed


def test_a_script_gives_one_process_and_two_ranks_the_same_results(tmp_path):
    one, printed = trained(tmp_path / "one")
    assert "Process 0/1 started (local rank 0)" in printed
    assert "Batch plan: 64 samples x 1 replica x 1 accumulation = 64 per step" in printed
    assert (tmp_path / "one" / "model.cyxmodel").is_file()
    flags = ["--nnodes=1", "--nproc_per_node=2", "--node_rank=0", "--master_addr=127.0.0.1"]
    two, printed = trained(tmp_path / "two", "-m", "cyxjax.launch", *flags, batch_size=32)
    for rank in range(2):
        assert printed.count(f"Process {rank}/2 started (local rank {rank})") == 1
    assert "[rank 0] Epoch 1/" in printed
    assert "[rank 1] Epoch" not in printed
    assert len(re.findall(r"Test loss \d+\.\d{4}, accuracy", printed)) == 1
    assert one.effective_batch_size == two.effective_batch_size == 64  # batch per replica x replicas
    assert (one.world_size, two.world_size) == (1, 2)
    # Sums over replicas in a different order; Adam's first steps amplify the rounding.
    np.testing.assert_allclose(two.train_losses, one.train_losses, rtol=1e-3)
    np.testing.assert_allclose(two.val_losses, one.val_losses, rtol=1e-3)
    again, printed = trained(tmp_path / "two", epochs=3)
    assert "Resuming from step" in printed  # one process, the same batch: the third epoch is trained
    assert len(again.train_losses) == 3


def test_without_torchrun_s_variables_it_is_one_process():
    assert dist.setup_distributed() == (0, 0, 1)
    assert dist.is_main_process()
    assert float(dist.reduce_tensor(np.float32(3.5))) == 3.5
    dist.barrier()
    dist.cleanup()
    assert not dist.is_initialized()
