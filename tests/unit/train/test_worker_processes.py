"""Samples that grain decodes in worker processes: the losses of decoding in this process."""

import json
import subprocess
import sys

import pytest

JOB = """
import os, sys, json
import grain
import numpy as np
import cyxjax as cx

PARENT = os.environ.setdefault("PARENT", str(os.getpid()))  # workers inherit it


class Decode(grain.transforms.Map):
    def map(self, index):
        own = str(os.getpid()) != PARENT
        x = np.random.default_rng(int(index)).normal(size=8).astype(np.float32)
        return x, np.int32(x.sum() > 0), np.int32(own)


class Pair(grain.transforms.Map):
    def map(self, sample):
        x, y, own = sample
        assert own == int(sys.argv[1] != "0")  # decoded where it should be
        return x, y


def rows(num_workers):
    found = grain.MapDataset.range(64).shuffle(seed=0).map(Decode()).to_iter_dataset()
    if num_workers:
        found = found.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
    return found.map(Pair()).batch(16)


if __name__ == "__main__":
    trainer = cx.DistributedTrainer(cx.get_model("mlp")(num_classes=2), "cross_entropy", cx.SGDOptimizer(0.1))
    history = trainer.fit(rows(int(sys.argv[1])), epochs=2, verbose=False)
    print(json.dumps(history.train_losses))
"""


def test_worker_processes_change_no_loss(tmp_path):
    pytest.importorskip("grain", reason="pip install 'cyxjax[grain]'")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    losses = []
    for num_workers in ("0", "2"):
        command = [sys.executable, job, num_workers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout.splitlines()[-1]))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
