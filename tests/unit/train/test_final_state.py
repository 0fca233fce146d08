"""A run whose final state is on no disk tries again for a while, then ends with an error that says so."""

import optax
import pytest
from flax import linen

from cyxjax.checkpoint import checkpointer as saves
from cyxjax.checkpoint.folders import list_steps
from cyxjax.checkpoint.store import StepStore
from cyxjax.cli import main as cli
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.distributed import process_group
from cyxjax.errors import EXIT_USER_ERROR, NotSavedError
from cyxjax.train.hooks import saving
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import X, Y, use_devices


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(saves, "_RETRY_S", 0.01)
    monkeypatch.setattr(saving, "PATIENCE_S", 0.5)
    monkeypatch.setattr(saving, "HURRIED_S", 0.5)
    yield
    process_group.finalize()


def fail(monkeypatch, writes):
    """Lets the writes of these numbers, counted from 1, fail; the list of steps that were tried."""
    real, tried = StepStore.write, []

    def write(self, snapshot):
        tried.append(snapshot.step)
        if len(tried) in writes:
            raise OSError(28, "No space left on device")
        real(self, snapshot)

    monkeypatch.setattr(StepStore, "write", write)
    return tried


def fit(folder, **changes):
    use_devices(2)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1))
    options = {"epochs": 2, "global_batch_size": 8, "checkpoint_every_n_steps": 2}
    config = DistributedTrainingConfig(checkpoint_dir=str(folder), **options | changes)
    return trainer, lambda: trainer.fit(X[:24], Y[:24], config)


def test_no_room_for_the_final_state_is_an_error_and_the_parameters_stay(tmp_path, monkeypatch):
    tried = fail(monkeypatch, range(2, 10**6))
    trainer, train = fit(tmp_path / "run")
    with pytest.raises(NotSavedError, match=r"step 6.* .*OSError: \[Errno 28\]"):
        train()
    assert tried[:3] == [2, 4, 6]
    assert set(tried[3:]) == {6}
    assert len(tried) > 5  # again and again
    assert list_steps(tmp_path / "run") == [2]
    monkeypatch.undo()
    trainer.save_checkpoint(str(tmp_path / "elsewhere"))
    assert list_steps(tmp_path / "elsewhere") == [6]


def test_room_that_comes_back_in_time_is_used(tmp_path, monkeypatch, caplog):
    tried = fail(monkeypatch, (3, 4, 5))
    fit(tmp_path)[1]()
    assert tried == [2, 4, 6, 6, 6, 6]
    assert list_steps(tmp_path) == [2, 4, 6]
    first, then = (record.message for record in caplog.records)  # and not a line for each time
    assert "step 6 was not saved" in first
    assert then == "Step 6 is the last: its save is tried again for 0.5 s."


def test_the_last_save_is_tried_whatever_became_of_those_before(tmp_path, monkeypatch):
    tried = fail(monkeypatch, (1, 2, 3))  # three in a row: one more in the middle would have been an error
    fit(tmp_path, checkpoint_every_n_steps=3, epochs=4, max_steps=10)[1]()
    assert tried == [3, 6, 9, 10]
    assert list_steps(tmp_path) == [10]


def test_the_command_says_it_last_and_does_not_end_well(tmp_path, monkeypatch, capsys):
    fail(monkeypatch, range(1, 10**6))
    words = ["--run-dir", str(tmp_path / "run"), "--max-steps", "2", "--optimizer.name", "sgd"]
    assert cli.main(["train", *words]) == EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert "Test: loss" in shown.out
    last = shown.err.splitlines()[-1]
    assert "The final state (step 2) could not be saved" in last
    assert "HINT: free space" in last
