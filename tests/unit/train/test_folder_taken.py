"""A run notices what is done to its folder while it trains, says it, and writes nowhere else."""

import os

import optax
import pytest
from flax import linen

from cyxjax.checkpoint import checkpointer as saves
from cyxjax.checkpoint.folders import list_steps
from cyxjax.checkpoint.run_lock import RunLock
from cyxjax.cli import audit
from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.errors import DataError, NotSavedError
from cyxjax.train.hooks import saving
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import X, Y

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(saves, "_RETRY_S", 0.01)
    monkeypatch.setattr(saving, "PATIENCE_S", 0.05)


class At(Hook):
    """Does something to the folder when a step is done."""

    def __init__(self, step, act):
        self._step, self._act = step, act

    def on_step(self, info):
        if info.position.step == self._step:
            self._act()


def run(folder, step, act, **changes):
    hook = At(step, act)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1), callbacks=[hook])
    options = {"epochs": 3, "global_batch_size": 8, "checkpoint_every_n_steps": 2, "steps_in_flight": 1}
    config = TrainConfig(run_dir=str(folder), **options | changes)
    with RunLock(folder):
        return trainer.fit_prepared(trainer.prepare(X[:24], Y[:24], config=config))


def swap(folder, target):
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(target)


def test_checkpoints_swapped_for_a_link_are_noticed_and_the_target_is_untouched(tmp_path, caplog):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(NotSavedError, match="checkpoints .*target"):
        run(tmp_path / "run", 3, lambda: swap(tmp_path / "run" / "checkpoints", target), epochs=2)
    assert os.listdir(target) == []
    assert "nothing is written there" in caplog.text


def test_deleted_checkpoints_are_made_again(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    run(tmp_path / "run", 5, lambda: folder.rename(tmp_path / "gone"), epochs=3)
    assert list_steps(folder)[-1] == 9


def test_a_ledger_that_is_a_link_is_refused_at_the_start(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "target").write_text("mine")
    (tmp_path / "run" / "ledger.jsonl").symlink_to(tmp_path / "target")
    with pytest.raises(DataError, match=r"ledger\.jsonl"):
        run(tmp_path / "run", 1, lambda: None)
    assert (tmp_path / "target").read_text() == "mine"
    assert list_steps(tmp_path / "run" / "checkpoints") == []


def test_a_ledger_swapped_for_a_link_is_told_and_not_followed(tmp_path, capsys):
    (tmp_path / "target").write_text("mine")

    def swapped():
        (tmp_path / "run" / "ledger.jsonl").unlink()
        (tmp_path / "run" / "ledger.jsonl").symlink_to(tmp_path / "target")

    run(tmp_path / "run", 3, swapped)
    assert "ledger.jsonl was not written" in capsys.readouterr().err
    assert (tmp_path / "target").read_text() == "mine"
    with pytest.raises(DataError, match="is a link"):
        audit.main([str(tmp_path / "run")])
