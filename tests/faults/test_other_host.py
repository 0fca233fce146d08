"""Hosts that differ in something no version number shows: code, compiled program, data."""

import re
import shutil
from pathlib import Path

import pytest

import cyxjax
from tests.support import forked
from tests.support.programs import environments

pytestmark = pytest.mark.multiprocess
LIMIT_S = 150


def two_ranks(folder: Path, commands: list[list[str]], **of_rank_1: str) -> list[tuple[int, str]]:
    """(exit code, output) of both ranks, each started by hand; `of_rank_1`: extra environment of rank 1."""
    first, other = environments(2, DISTRIBUTED_TIMEOUT_MS=60_000)
    words = [["-W", "ignore", *command] for command in commands]
    fresh = forked.FRESH if "PYTHONPATH" in of_rank_1 else ()  # rank 1 must load different code
    ended = forked.run_all([*zip(words, (first, other | of_rank_1), strict=True)], LIMIT_S, folder, fresh)
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
cx.distributed.init()
for what in sys.argv[1:]:
    x, y, values = X.copy(), Y.copy(), {"batch_size": 8, "verbose": False, "checkpoint_every_n_epochs": 0}
    other = what if os.environ["RANK"] == "1" else ""
    if other == "label":
        y[5] = (y[5] + 1) % 3
    if other == "rate":
        values["max_grad_norm"] = 2.0
    if other == "noise":
        x = np.nextafter(x, 9, dtype=np.float32)
    trainer = cx.distributed.DistributedTrainer(build(other), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    try:
        trainer.fit(x, y, config=cx.distributed.DistributedTrainingConfig(epochs=1, **values))
        print(what, "trained", flush=True)
    except cx.errors.CyxjaxError as error:
        print(what, error, flush=True)
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
def build(other):
    return Net(2.0 if other == "model" else 1.0)
"""


BEFORE_THEY_MEET = {
    "code": "ranks differ in the code of cyxjax/core: .* on rank 0; .* on rank 1",
    "program": r"ranks differ in the program: train\.py .* on rank 0; other\.py .* on rank 1",
}
DIFFERENCES = {
    "label": "ranks differ in the training data: .*rank 1",
    "rate": r"ranks differ in max_grad_norm of the configuration: null on rank 0; 2\.0 on rank 1",
    "model": r"ranks differ in the program of a step \(the model's or the loss's code\): .*rank 1",
    "noise": "trained",  # a processor that rounds differently
}


@pytest.fixture
def programs(tmp_path):
    for name, text in (("train.py", TRAIN), ("other.py", TRAIN + "# a line more\n"), ("model.py", MODEL)):
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize("what", BEFORE_THEY_MEET)
def test_other_code_or_another_program_is_refused_on_both_ranks(tmp_path, programs, what):
    commands = [["train.py", "noise"], ["other.py" if what == "program" else "train.py", "noise"]]
    env = {"PYTHONPATH": altered_package(tmp_path / "other")} if what == "code" else {}
    for code, text in two_ranks(tmp_path, commands, **env):
        assert code == 1, text
        assert "trained" not in text
        assert re.search(BEFORE_THEY_MEET[what], text), text


def test_what_no_version_tells_is_refused_on_both_ranks_before_a_step(tmp_path, programs):
    for code, text in two_ranks(tmp_path, [["train.py", *DIFFERENCES]] * 2):
        assert code == 0, text
        assert text.count("trained") == 1
        for what, message in DIFFERENCES.items():
            assert re.search(rf"^{what} {message}", text, re.MULTILINE), text


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
own_disk = {"checkpoint_dir": f"disk{rank}", "checkpoint_every_n_epochs": 1}
trainer = fit("mean", epochs=1, **own_disk)
if rank == 0:
    trainer.save_checkpoint("alone")
trainer.load_checkpoint("alone")
print("loaded", trainer.run_state.position.step, flush=True)
fit("fsdp", epochs=1).save_checkpoint("together")
print("saved", sorted(os.listdir("together/step_00000004/arrays")), flush=True)
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
