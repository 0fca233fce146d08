"""Hosts that differ in something no version number shows: code, compiled program, data."""

import re
import shutil
from pathlib import Path

import pytest

import cyxjax
from tests.support import forked
from tests.support.programs import environment, free_port

pytestmark = pytest.mark.multiprocess
LIMIT_S = 150


def two_ranks(folder: Path, commands: list[list[str]], **of_rank_1: str) -> list[tuple[int, str]]:
    """(exit code, output) of both ranks, each started by hand; `of_rank_1`: extra environment of rank 1."""
    place = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "DISTRIBUTED_TIMEOUT_MS": "60000"}
    ranks = [
        (["-W", "ignore", *command], environment(**place, RANK=str(rank), **(of_rank_1 if rank else {})))
        for rank, command in enumerate(commands)
    ]
    fresh = "PYTHONPATH" in of_rank_1  # rank 1 must load different code
    ended = (forked.run_fresh if fresh else forked.run_all)(ranks, LIMIT_S, folder)
    return [(rank.returncode, rank.stdout + rank.stderr) for rank in ended]


def altered_package(folder: Path) -> str:
    """A folder for PYTHONPATH with a copy of cyxjax of the same version in which one loss differs."""
    shutil.copytree(
        Path(cyxjax.__file__).parent, folder / "cyxjax", ignore=shutil.ignore_patterns("__pycache__")
    )
    losses = folder / "cyxjax" / "core" / "losses.py"
    losses.write_text(losses.read_text() + "\nALTERED = 1\n")
    return str(folder)


TRAIN = """
import os
import sys
import numpy as np
import cyxjax as cx
from model import build
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(64, 6)).astype(np.float32), rng.integers(0, 3, 64)
rank = int(os.environ["RANK"])
values = {"epochs": 1, "batch_size": 8, "verbose": False, "checkpoint_every_n_epochs": 0}
if rank == 1 and "label" in sys.argv:
    Y[5] = (Y[5] + 1) % 3
if rank == 1 and "rate" in sys.argv:
    values["max_grad_norm"] = 2.0
if rank == 1 and "noise" in sys.argv:
    X = np.nextafter(X, 9, dtype=np.float32)
model = build(rank, sys.argv)
trainer = cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
trainer.fit(X, Y, config=cx.distributed.DistributedTrainingConfig(**values))
print("trained", flush=True)
"""
MODEL = """
import jax
from flax import linen
class Net(linen.Module):
    scale: float
    @linen.compact
    def __call__(self, x):
        jax.debug.callback(lambda v: None, x[0, 0])
        return linen.Dense(3)(x) * self.scale
def build(rank, argv):
    return Net(2.0 if rank == 1 and "model" in argv else 1.0)
"""


DIFFERENCES = {
    "code": "ranks differ in the code of cyxjax/core: .* on rank 0; .* on rank 1",
    "program": r"ranks differ in the program: train\.py .* on rank 0; other\.py .* on rank 1",
    "label": "ranks differ in the training data: .*rank 1",
    "rate": r"ranks differ in max_grad_norm of the configuration: null on rank 0; 2\.0 on rank 1",
    "model": r"ranks differ in the program of a step \(the model's or the loss's code\): .*rank 1",
    "noise": "trained",  # a processor that rounds differently
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_no_version_tells_is_refused_on_both_ranks_before_a_step(tmp_path, what):
    for name, text in (("train.py", TRAIN), ("other.py", TRAIN + "# a line more\n"), ("model.py", MODEL)):
        (tmp_path / name).write_text(text)
    commands = [["train.py", what], ["other.py" if what == "program" else "train.py", what]]
    env = {"PYTHONPATH": altered_package(tmp_path / "other")} if what == "code" else {}
    for code, text in two_ranks(tmp_path, commands, **env):
        assert code == (what != "noise"), text
        assert ("trained" in text) == (what == "noise")
        assert re.search(DIFFERENCES[what], text), text


DISKS = """
import os
import numpy as np
import cyxjax as cx
from flax import linen
X, Y = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32), np.arange(64) % 3
rank = int(os.environ["RANK"])
def fit(comm, **values):
    trainer = cx.distributed.DistributedTrainer(linen.Dense(3), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    values = {"batch_size": 8, "verbose": False, "checkpoint_every_n_epochs": 0, "comm": comm} | values
    trainer.fit(X, Y, config=cx.distributed.DistributedTrainingConfig(**values))
    return trainer
trainer = fit("mean", epochs=1)
if rank == 0:
    trainer.save_checkpoint("alone")
trainer.load_checkpoint("alone")
print("loaded", trainer.run_state.position.step, flush=True)
fit("fsdp", epochs=1).save_checkpoint("together")
print("saved", sorted(os.listdir("together/step_00000004/arrays")), flush=True)
own_disk = {"checkpoint_dir": f"disk{rank}", "checkpoint_every_n_epochs": 1}
fit("mean", epochs=1, **own_disk)
fit("mean", epochs=2, resume="auto", **own_disk)
print("went on", flush=True)
"""


def test_a_run_goes_on_from_no_step_that_one_host_alone_sees(tmp_path):
    """The other host used to start over beside it, and after a save by one rank no collective save ended."""
    (tmp_path / "train.py").write_text(DISKS)
    for rank, (code, text) in enumerate(two_ranks(tmp_path, [["train.py"]] * 2)):
        assert code == 1, text
        assert "loaded 4" in text
        assert "saved ['process_00000.safetensors', 'process_00001.safetensors']" in text
        assert f"Checkpoints in {tmp_path}/disk{rank}: for process 1 step 4 is not there. HINT: name" in text
        assert "went on" not in text
