"""Tests that need a GPU: the same step there, and NCCL between its devices."""

import json

import pytest

from tests.gpu.support import needs_gpu, python

pytestmark = needs_gpu

TRAIN = """
import json, sys
import numpy as np
import cyxjax as cx

group = cx.distributed.init_process_group(backend=sys.argv[1])
splits = cx.load_dataset("digits")
model = cx.get_model("cnn")(num_classes=10)
trainer = cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
config = cx.distributed.DistributedTrainingConfig(
    epochs=2, global_batch_size=64, verbose=False, checkpoint_every_n_epochs=0, precision=sys.argv[2]
)
history = trainer.fit(splits.train, splits.val, config)
import jax
print(json.dumps({"platform": jax.default_backend(), "losses": history.train_losses}))
"""


def train(backend: str, precision: str = "float32") -> dict:
    done = python("-c", TRAIN, backend, precision)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_gpu_gives_the_losses_of_the_cpu():
    gpu, cpu = train("nccl"), train("gloo")
    assert gpu["platform"] == "gpu"
    # Convolutions sum in a different order: 40 SGD steps at 1e-7 relative per step.
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=1e-3)


def test_bfloat16_trains_on_a_gpu():
    losses = train("nccl", "bfloat16")["losses"]
    assert losses[-1] < losses[0]
