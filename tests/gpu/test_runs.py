"""Runs on a GPU: every strategy, bits after a kill, and a checkpoint that a CPU continues."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.gpu.support import needs_gpu, python

pytestmark = needs_gpu

STRATEGIES = """
import json
import cyxjax as cx
from cyxjax.sync.registry import STRATEGIES

data, losses = cx.load_dataset("digits"), {}
for comm in STRATEGIES:
    for offload in ("none", "optimizer"):
        trainer = cx.distributed.DistributedTrainer(
            cx.get_model("cnn")(num_classes=10), cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-3)
        )
        config = cx.distributed.DistributedTrainingConfig(
            epochs=1, batch_size=64, verbose=False, checkpoint_every_n_epochs=0, comm=comm, offload=offload
        )
        losses[f"{comm}, {offload}"] = trainer.fit(data.train, data.val, config).train_losses
print(json.dumps(losses))
"""

RUN = """
import json, os, signal, sys
import numpy as np
import cyxjax as cx

folder, mode, kill_at, work = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
cx.distributed.init(threads=8)
if work == "gpt":  # long enough for cuDNN's attention
    text = np.random.default_rng(0).integers(0, 96, (512, 513)).astype(np.int32)
    model = cx.get_model("gpt")(vocab_size=96, context_length=512, num_layers=2, num_heads=4, width=256)
    data, precision = (text[:, :-1], text[:, 1:]), "bfloat16"
else:
    digits = cx.load_dataset("digits")
    model, data, precision = cx.get_model(work)(num_classes=10), (digits.train, digits.val), "float32"


class Kill(cx.Callback):
    def on_step(self, info):
        if info.position.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


trainer = cx.distributed.DistributedTrainer(
    model, cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-3), callbacks=[Kill()]
)
config = cx.distributed.DistributedTrainingConfig(
    epochs=2, global_batch_size=64, verbose=False, checkpoint_dir=folder + "/checkpoints",
    checkpoint_every_n_steps=5, reproducibility=mode, precision=precision,
)
history = trainer.fit(*data, config)
import jax
print(json.dumps({"platform": jax.default_backend(), "losses": history.train_losses}))
"""


def report(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_strategy_trains_on_a_gpu_as_mean_does():
    """With one replica nothing is sent, so compression is lossless, and offload only moves bits."""
    losses = report(python("-c", STRATEGIES))
    for name, found in losses.items():
        assert found == pytest.approx(losses["mean, none"], rel=1e-4), name


@pytest.mark.parametrize("work", ["cnn", "gpt"])
def test_an_exact_run_that_was_killed_has_the_same_bits(work, tmp_path: Path):
    """Each process compiles its own programs: none is chosen by timing."""
    runs = [tmp_path / "whole", tmp_path / "killed"]
    fresh = iter({"JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"programs_{n}")} for n in range(3))
    assert report(python("-c", RUN, runs[0], "exact", 0, work, **next(fresh)))["platform"] == "gpu"
    assert python("-c", RUN, runs[1], "exact", 14, work, **next(fresh)).returncode == -signal.SIGKILL
    assert report(python("-c", RUN, runs[1], "exact", 0, work, **next(fresh)))["platform"] == "gpu"
    compared = python("-m", "cyxjax", "hash", *runs)
    assert compared.stdout.startswith("equal"), compared.stdout


def test_a_run_of_a_gpu_goes_on_on_a_cpu(tmp_path: Path):
    assert python("-c", RUN, tmp_path, "none", 14, "cnn").returncode == -signal.SIGKILL
    resumed = report(python("-c", RUN, tmp_path, "none", 0, "cnn", DISTRIBUTED_BACKEND="cpu"))
    assert resumed["platform"] == "cpu"
    assert len(resumed["losses"]) == 2


def test_more_processes_than_gpus_are_refused(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text("import cyxjax as cx\ncx.distributed.init()\n")
    gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    many = python("-m", "cyxjax.launch", "--nproc-per-node", gpus + 1, program)
    assert many.returncode != 0
    assert "start at most" in many.stderr
