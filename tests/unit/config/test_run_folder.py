"""Folders that cannot be created are refused in one line, before anything is loaded or written."""

from pathlib import Path

import pytest

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import load_config
from cyxjax.errors import ConfigError
from cyxjax.run_folder import RunFolder
from cyxjax.train import experiment
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("run_dir", "checkpoint_dir", "wrong"),
    [
        ("file", "checkpoints", "file"),
        ("file/a/b", "checkpoints", "file"),
        ("circle/run", "checkpoints", "circle"),
        ("run", "file", "file"),
        ("run", "circle", "circle"),
    ],
)
def test_a_file_and_a_circle_of_links_are_no_folders(tmp_path, run_dir, checkpoint_dir, wrong):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    config = TrainConfig(run_dir=str(tmp_path / run_dir), checkpoint_dir=str(tmp_path / checkpoint_dir))
    with pytest.raises(ConfigError, match=rf"{tmp_path / wrong}\W.*HINT"):
        experiment.prepare(config)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/", "notes.txt"),
        *((".", name) for name in ("notes.txt", "config.yaml", "data.json", "history.json", "report.html")),
    ],
)
def test_a_folder_that_holds_other_things_and_no_run_is_refused(cwd, folder, name):
    (cwd / name).write_text("mine")
    with refused("run_dir"):
        RunFolder(Path(folder)).refuse_unusable()
    assert [path.name for path in cwd.iterdir()] == [name]


def test_an_experiment_does_not_replace_a_file_that_no_experiment_wrote(cwd):
    (cwd / "run.lock").touch()  # as of a program that saves here
    (cwd / "config.yaml").write_text("epochs: 3  # mine\n")
    with pytest.raises(ConfigError, match=r"run_dir.*\bconfig\.yaml"):
        experiment.prepare(load_config(["--config", "config.yaml", "--run-dir", "."]))


@pytest.mark.parametrize(
    "present",
    [
        [],
        [".hidden", "lost+found", "logs", "slurm-7.out", "profile"],
        ["mine", "run.lock"],  # killed before it wrote more
        ["mine", "ledger.jsonl"],  # of 0.2.0
        ["kept/"],  # made for the checkpoints
        ["mine", "kept/steps/step_00000040/"],  # a run with only checkpoints
    ],
)
def test_a_new_folder_and_that_of_a_run_are_taken(tmp_path, present):
    for name in present:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    RunFolder(tmp_path, "kept/steps").refuse_unusable()
    RunFolder(tmp_path / "new").refuse_unusable()
