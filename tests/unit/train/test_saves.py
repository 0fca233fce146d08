"""Saves that fail are retried and reported; a folder that changes during its run is not written to."""

import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from cyxjax.checkpoint import checkpointer as saves
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.checkpoint.store import StepStore
from cyxjax.cli import audit
from cyxjax.cli.checkpoint import main as command_checkpoint
from cyxjax.config.sections import ScheduleConfig
from cyxjax.distributed import process_group
from cyxjax.errors import (
    EXIT_USER_ERROR,
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    NotSavedError,
)
from cyxjax.train.hooks import saving
from tests.support.trainers import (
    BROUGHT,
    VAL,
    At,
    X,
    Y,
    after_fit,
    command,
    config,
    fitted,
    run_experiment,
    trainer,
)

pytestmark = pytest.mark.usefixtures("two_devices")
KEPT = {"checkpoint_every_n_steps": 2}


def test_the_best_checkpoint_is_of_a_state_that_was_evaluated(tmp_path):
    data = X[:24], Y[:24], VAL[0], (VAL[1] + 1) % 3  # wrong labels: the last evaluations are not the best
    saving = {"run_dir": tmp_path, "keep_last": 1, "keep_best": 1}
    history = fitted(data=data, epochs=6, **KEPT, **saving).history
    measured = dict(zip(history.val_steps, history.val_losses, strict=True))
    folder = tmp_path / "checkpoints"
    kept = {step: read_manifest(step_folder(folder, step)).metric for step in list_steps(folder)}
    assert kept == {step: measured.get(step) for step in kept}
    due = {step for step in measured if step % 2 == 0}
    assert min(due, key=measured.get) in kept  # the best of those that were saved
    assert len(kept) == 2


def test_a_checkpoint_within_an_epoch_has_the_time_and_steps_up_to_it(tmp_path):
    fitted(checkpoint_dir=tmp_path, keep_last=9, **KEPT)
    found = [read_manifest(step_folder(tmp_path, step)).meta["history"] for step in list_steps(tmp_path)]
    assert [history["num_steps"] for history in found] == [2, 4, 6]
    times = [history["total_time_seconds"] for history in found]
    assert times == sorted(set(times))


@pytest.mark.parametrize("store", ["memory://", "file://"])
def test_a_fit_that_must_resume_takes_the_run_from_its_mirror(tmp_path, store):
    url = f"{store}{tmp_path}/copy"
    fitted(run_dir=tmp_path / "a", mirror=url, **KEPT)
    mirrored = {"run_dir": tmp_path / "b", "mirror": url, "resume": "must", "epochs": 3}
    again = fitted(ckpt_path=str(tmp_path / "none"), **mirrored, **KEPT)  # this path is not read
    assert again.history.num_steps == 9
    assert len(again.history.train_losses) == 3


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    """The square root has no derivative at 0: the loss of the last step is finite, its gradient is not."""
    x, y = np.where(np.arange(24) < 16, 1.0, 0.0).astype(np.float32)[:, None], np.zeros((24, 1), np.float32)
    loss = lambda output, target: jnp.sqrt(jnp.square(output - target)).sum(-1)  # noqa: E731
    settings = config(epochs=1, shuffle=False, checkpoint_every_n_steps=1)
    one = trainer(linen.Dense(1, use_bias=False), loss)
    with pytest.raises(NonFiniteError, match="parameters .*step 3"):
        one.fit(x, y, settings, run_dir=tmp_path)
    assert list_steps(tmp_path / "checkpoints") == [1, 2]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(saves, "_RETRY_S", 0.01)
    monkeypatch.setattr(saving, "LAST_SAVE_S", 0.5)
    monkeypatch.setattr(saving, "HURRIED_SAVE_S", 0.5)


def fail(monkeypatch, writes):
    """Makes the writes with these numbers, counted from 1, fail; the list of tried steps."""
    real, tried = StepStore.write, []

    def write(self, snapshot, *writers):
        tried.append(snapshot.step)
        if len(tried) in writes:
            raise OSError(28, "No space left on device")
        real(self, snapshot, *writers)

    monkeypatch.setattr(StepStore, "write", write)
    return tried


def test_no_room_for_the_final_state_is_an_error_and_the_parameters_stay(tmp_path, monkeypatch):
    tried, one = fail(monkeypatch, range(2, 10**6)), trainer(linen.Dense(3))
    with pytest.raises(NotSavedError, match=r"step 6.* .*OSError: \[Errno 28\]"):
        one.fit(X[:24], Y[:24], config(checkpoint_dir=str(tmp_path / "run"), **KEPT))
    assert tried[:3] == [2, 4, 6]
    assert set(tried[3:]) == {6}
    assert len(tried) > 5  # again and again
    assert list_steps(tmp_path / "run") == [2]
    monkeypatch.undo()
    one.save_checkpoint(str(tmp_path / "elsewhere"))
    assert list_steps(tmp_path / "elsewhere") == [6]


@pytest.mark.parametrize(
    ("writes", "settings", "steps", "kept", "lines"),
    [
        # Room comes back in time: not saved; is tried again: not a line for each time.
        ((3, 4, 5), {}, [2, 4, 6, 6, 6, 6], [2, 4, 6], 2),
        # Three in a row: one more in the middle would have been an error, but the last save is tried.
        ((1, 2, 3), {"checkpoint_every_n_steps": 3, "epochs": 4, "max_steps": 10}, [3, 6, 9, 10], [10], 3),
    ],
)
def test_writes_that_fail_are_made_up_for(
    writes, settings, steps, kept, lines, tmp_path, monkeypatch, caplog
):
    tried = fail(monkeypatch, writes)
    fitted(checkpoint_dir=str(tmp_path), **KEPT | settings)
    assert (tried, list_steps(tmp_path), len(caplog.records)) == (steps, kept, lines)


def test_a_save_that_failed_is_not_tried_again_when_the_run_has_gone_back_before_it(tmp_path, monkeypatch):
    tried = fail(monkeypatch, (2,))
    with saves.Checkpointer(tmp_path) as kept:
        for step in (3, 5):
            kept.save(step, {"a": jnp.ones(2)})
        kept.rewind(4)
        kept.finish(1.0)
    assert (tried, list_steps(tmp_path)) == ([3, 5], [3])


def test_saves_fall_due_by_minutes_too(tmp_path):
    alone = {"steps_in_flight": 1, "steps_per_dispatch": 1}
    fitted(checkpoint_dir=str(tmp_path), checkpoint_every_n_minutes=1e-9, keep_last=9, **alone)
    assert len(list_steps(tmp_path)) > 2  # not the last step alone


def test_the_command_says_it_last_and_does_not_end_well(tmp_path, monkeypatch, capsys):
    process_group.finalize()  # the command makes its own
    fail(monkeypatch, range(1, 10**6))
    # The steps of `run_experiment`.
    words = [*BROUGHT, "--run-dir", tmp_path / "run", "--epochs", 1, "--batch-size", 16]
    assert command("train", *words, "--optimizer.name", "sgd", "--optimizer.lr", 0.1) == EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert "Test: loss" in shown.out
    assert "The final state (step 1) could not be saved" in shown.err.splitlines()[-1]


# ---- a folder that changes ---------------------------------------------------------------------------------


def run(folder, step, act, **changes):
    fitted(
        At(step, lambda info: act()), run_dir=str(folder), steps_in_flight=1, report=False, **KEPT, **changes
    )


def test_checkpoints_swapped_for_a_link_are_noticed_and_the_target_is_untouched(tmp_path, caplog):
    target, folder = tmp_path / "target", tmp_path / "run" / "checkpoints"
    target.mkdir()

    def swap():
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(target)

    with pytest.raises(NotSavedError, match="checkpoints .*target"):
        run(tmp_path / "run", 3, swap)
    assert os.listdir(target) == []
    assert "nothing is written there" in caplog.text


def test_deleted_checkpoints_are_made_again(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    run(tmp_path / "run", 5, lambda: folder.rename(tmp_path / "gone"), epochs=3)
    assert list_steps(folder)[-1] == 9


def test_checkpoints_deleted_after_a_resume_was_planned_are_missed(cwd):
    settings = config(checkpoint_dir="saves", resume="auto", checkpoint_every_n_epochs=1)
    after_fit(X[:24], Y[:24], settings, model=linen.Dense(3))
    second = trainer(linen.Dense(3))
    prepared = second.prepare(X[:24], Y[:24], config=settings)
    (cwd / "saves").rename(cwd / "gone")
    with pytest.raises(CheckpointError, match="saves"):
        second.fit_prepared(prepared)


def test_what_another_job_saved_after_the_start_was_planned_is_compared_as_ever(cwd):
    settings = config(checkpoint_dir="saves", resume="auto", checkpoint_every_n_epochs=1)
    mine, other = after_fit(X[:24], Y[:24], config(seed=8), model=linen.Dense(3)), trainer(linen.Dense(3))
    named = trainer(linen.Dense(3))
    named.class_names, other.class_names = ("a", "b", "c"), ("c", "b", "a")
    prepared = [one.prepare(X[:24], Y[:24], config=settings) for one in (mine, named)]
    other.fit(X[:16], Y[:16], settings)
    with pytest.raises(ConfigError, match="saves"):  # what it trained would be lost
        mine.fit_prepared(prepared[0])
    with pytest.raises(CheckpointError, match="c, b, a"):
        named.fit_prepared(prepared[1])


@pytest.mark.parametrize("values", [{}, {"batch_size": 12}], ids=["unchanged", "another batch"])
def test_what_another_job_saved_after_the_start_was_planned_is_resumed_if_the_plan_holds(cwd, values):
    settings = config(epochs=3, checkpoint_dir="saves", resume="auto", checkpoint_every_n_epochs=1)
    linear = ScheduleConfig(name="linear")
    first = trainer(linen.Dense(3))
    first.fit(X[:24], Y[:24], settings, schedule=linear)
    (cwd / "saves").rename(cwd / "others")
    second = trainer(linen.Dense(3))
    now = settings.model_copy(update=values)
    prepared = second.prepare(X[:24], Y[:24], config=now, schedule=linear)
    (cwd / "others").rename(cwd / "saves")
    if values:
        with pytest.raises(CheckpointError, match=f"step {first.history.num_steps}"):
            second.fit_prepared(prepared)
    else:
        assert second.fit_prepared(prepared).train_losses == first.history.train_losses


def link_the_ledger(folder):
    (folder / "target").write_text("mine")
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "ledger.jsonl").unlink(missing_ok=True)
    (folder / "run" / "ledger.jsonl").symlink_to(folder / "target")


def test_a_run_that_starts_over_beside_its_checkpoints_says_where_they_are(tmp_path, capsys):
    warned = []
    for folder, resume in (("a", "auto"), ("a", "auto"), ("b", "auto"), ("c", "never")):
        run_experiment(tmp_path, checkpoint_dir=folder, resume=resume)
        warned.append("--checkpoint-dir a" in capsys.readouterr().err)
    assert warned == [False, False, True, False]
    shutil.rmtree(tmp_path / "b")  # gone, as a disk that is not mounted
    run_experiment(tmp_path, checkpoint_dir="b", resume="auto")
    assert "WARNING" in capsys.readouterr().err


def test_a_ledger_that_is_a_link_is_refused_at_the_start(tmp_path):
    link_the_ledger(tmp_path)
    with pytest.raises(DataError, match=r"ledger\.jsonl"):
        run(tmp_path / "run", 1, lambda: None)
    assert (tmp_path / "target").read_text() == "mine"
    assert list_steps(tmp_path / "run" / "checkpoints") == []


def test_a_ledger_swapped_for_a_link_is_told_and_not_followed(tmp_path, capsys):
    run(tmp_path / "run", 3, lambda: link_the_ledger(tmp_path))
    assert "ledger.jsonl was not written" in capsys.readouterr().err
    assert (tmp_path / "target").read_text() == "mine"
    for use in (lambda: audit.main([str(tmp_path / "run")]), lambda: run(tmp_path / "run", 4, lambda: None)):
        with pytest.raises(DataError, match="is a link"):
            use()
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("run_dir", [None, "run"])
def test_prune_beside_a_running_job_is_refused_wherever_its_checkpoints_are(tmp_path, run_dir):
    folder, found = tmp_path / "kept", []

    def prune(info):
        with pytest.raises(CheckpointError, match=f"{folder.name} .*process {os.getpid()} "):
            command_checkpoint(["prune", str(folder), "--keep-last", "1"])
        found.extend(list_steps(folder))

    options = {"checkpoint_dir": str(folder), "checkpoint_every_n_steps": 1, "checkpoint_async": False}
    options["run_dir"] = run_dir and str(tmp_path / run_dir)
    fitted(At(3, prune), steps_in_flight=1, steps_per_dispatch=1, epochs=1, **options)
    assert found == [1, 2]


def test_a_run_may_keep_its_checkpoints_in_the_run_folder_itself(tmp_path):
    """One folder is locked once."""
    for epochs in (1, 2):
        history = fitted(run_dir=str(tmp_path / "run"), checkpoint_dir=".", epochs=epochs, **KEPT).history
    assert history.num_steps == 6
