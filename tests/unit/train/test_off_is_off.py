"""Disabled features touch no files; files set aside are reported; a refusal changes nothing."""

import errno
import os
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from flax import linen

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps
from cyxjax.cli import audit
from cyxjax.cli import checkpoint as checkpoint_command
from cyxjax.config.load import open_run
from cyxjax.distributed import process_group
from cyxjax.errors import CheckpointError
from cyxjax.launch.backend import pages, programs
from cyxjax.run_folder import LOCK
from cyxjax.train import experiment
from cyxjax.train.__main__ import main
from tests.support.trainers import (
    BROUGHT,
    NET,
    At,
    X,
    Y,
    batches,
    config,
    fitted,
    run_experiment,
    trainer,
)

pytestmark = pytest.mark.usefixtures("two_devices")
DATA = X[:24], Y[:24]


def everything(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
        if (path.is_file() and path.name != LOCK) or "step_" in path.name
    }


def test_a_fit_keeps_compiled_programs_where_its_configuration_says(cwd, monkeypatch):
    monkeypatch.setenv("CYXJAX_COMPILE_CACHE", str(cwd / "environment"))
    try:
        fitted(compile_cache="off")
        assert list(cwd.iterdir()) == []
        fitted(data=(X[:8, :5], Y[:8]), compile_cache=str(cwd / "asked"))  # shapes of no other test
        assert [path.name for path in cwd.iterdir()] == ["asked"]
        assert list((cwd / "asked").rglob("*.program"))
    finally:
        monkeypatch.undo()
        programs.keep()


def test_a_fit_sets_the_pages_of_memory_that_its_configuration_says(monkeypatch):
    used = []
    monkeypatch.setattr(pages, "use", lambda word, processes_here: used.append(word))
    for words in ({}, {"memory_pages": yaml.safe_load("off")}):
        trainer(linen.Dense(3)).prepare(*DATA, config=config(**words))
    assert used == ["auto", "off"]


def test_a_fit_that_saves_nothing_makes_no_folder_and_leaves_an_earlier_run_s_as_it_is(cwd, capsys):
    fitted(At(1, lambda info: os.kill(os.getpid(), signal.SIGUSR1)), verbose=True)
    assert os.listdir(cwd) == []
    assert "SIGUSR1 asks for a checkpoint, but checkpoints are off" in capsys.readouterr().out
    fitted(checkpoint_every_n_steps=2)  # into ./checkpoints, the default
    (cwd / "checkpoints" / "step_00000099.tmp-ab-1").mkdir()
    before = everything(cwd)
    for resume in ("never", "auto"):
        fitted(resume=resume, epochs=3)
        assert everything(cwd) == before


def test_later_checkpoints_than_the_step_that_a_fit_goes_on_from_are_kept_and_named(
    tmp_path, capsys, printed
):
    kept = {"checkpoint_every_n_steps": 2, "checkpoint_dir": str(tmp_path / "run"), "verbose": True}
    one = fitted(**kept)  # steps 2, 4 and 6
    one.load_checkpoint(str(tmp_path / "run"), step=4)
    one.fit(*DATA, config(**kept))
    assert "of this run (6) are kept as step_*.abandoned-*" in capsys.readouterr().out
    fitted(**kept, epochs=1)
    assert "of an earlier run (2, 4, 6) are kept as step_*.earlier-*" in capsys.readouterr().out
    assert list_steps(tmp_path / "run") == [2, 3]
    printed(checkpoint_command.main, "prune", tmp_path / "run", "--keep-last", "1", "--keep-best", "0")
    assert len(list((tmp_path / "run").glob("*.earlier-*"))) == 3  # nothing of ours deletes them
    assert "from an earlier run in this folder" in printed(checkpoint_command.main, "ls", tmp_path / "run")
    Checkpointer(tmp_path / "mine", async_save=False).save(50, {"x": np.zeros(2)})
    one.save_checkpoint(str(tmp_path / "mine"))
    assert list_steps(tmp_path / "mine") == [6]  # the newest, and what load_checkpoint takes
    assert len(list((tmp_path / "mine").glob("step_00000050.earlier-*"))) == 1


def test_an_experiment_that_is_refused_has_not_rewritten_its_configuration(tmp_path):
    run_experiment(tmp_path, verbose=False)
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match="Dense_0"):
        run_experiment(tmp_path, verbose=False, model={"name": NET, "options": {"width": 5}})
    assert everything(tmp_path) == before


def test_the_commands_look_where_the_configuration_says(tmp_path, printed):
    run = tmp_path / "run"
    run_experiment(run, batch_size=4, checkpoint_dir="saves", max_steps=3, checkpoint_every_n_steps=1)
    assert open_run(run).checkpoints == run / "saves"
    (run / "checkpoints").mkdir()  # is not its folder of checkpoints
    assert audit.main([str(run)]) == 0
    assert len(printed(checkpoint_command.main, "ls", run).splitlines()) == 1 + 3
    # what the audit finds there: a checkpoint further on than the record
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-1]))
    shown = printed(audit.main, run, code=1)
    assert "behind: the record ends 1 steps before the checkpoint of step 3" in shown


class FailsInTraining(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        return linen.Dense(3)(x.reshape(5, 5) if train else x)


@pytest.mark.parametrize("data", [DATA, (batches(*DATA, 8),)], ids=["arrays", "loader"])
def test_a_model_that_fails_in_its_first_step_leaves_an_earlier_run_as_it_is(tmp_path, data):
    kept = config(epochs=1, checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path / "run"))
    trainer(linen.Dense(3)).fit(*data, config=kept)
    before = everything(tmp_path)
    with pytest.raises(TypeError, match=r"\(5, 5\)"):
        trainer(FailsInTraining()).fit(*data, config=kept)
    assert len(before) > 1
    assert everything(tmp_path) == before


def test_a_disk_that_is_full_at_the_start_costs_one_line(cwd, monkeypatch, capsys):
    process_group.finalize()  # the command makes its own
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(experiment, "write_atomic", full)
    assert main([*BROUGHT, "--run-dir", "out", "--optimizer.name", "sgd", "--no-verbose"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert "run_dir=out: No space left on device. HINT: " in line
    assert not list((cwd / "out").rglob("step_*"))
