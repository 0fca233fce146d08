"""Samples that grain decodes in a worker process give the losses of decoding in this process."""

import json

import pytest

from tests.support.programs import printed_by

JOB = """
import os, json
import grain
import numpy as np

PARENT = os.environ.setdefault("PARENT", str(os.getpid()))  # workers inherit it


class Decode(grain.transforms.Map):
    def map(self, index):
        own = str(os.getpid()) != PARENT
        x = np.random.default_rng(int(index)).normal(size=8).astype(np.float32)
        return x, np.int32(x.sum() > 0), np.int32(own)


def rows(num_workers):
    def pair(sample):
        x, y, own = sample
        assert own == int(num_workers > 0)  # decoded where it should be
        return x, y

    found = grain.MapDataset.range(64).shuffle(seed=0).map(Decode()).to_iter_dataset()
    if num_workers:
        found = found.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
    return found.map(pair).batch(16)


def losses(num_workers):
    import cyxjax as cx  # here: the workers import this file, and need it not

    trainer = cx.DistributedTrainer(cx.get_model("mlp")(num_classes=2), "cross_entropy", cx.SGDOptimizer(0.1))
    return trainer.fit(rows(num_workers), epochs=1, verbose=False).train_losses


if __name__ == "__main__":
    print(json.dumps([losses(0), losses(1)]))
"""


def test_a_worker_process_changes_no_loss(tmp_path):
    pytest.importorskip("grain", reason="pip install 'cyxjax[grain]'")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    here, in_workers = json.loads(printed_by(job, cwd=tmp_path).splitlines()[-1])
    assert here == in_workers
    assert len(here) == 1
