"""Folders that can never be made are refused in one line, before anything is loaded or written."""

from pathlib import Path

import pytest

from cyxjax.config.experiment import TrainConfig
from cyxjax.errors import ConfigError
from cyxjax.run_folder import RunFolder
from cyxjax.train import experiment


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    return path


def refused(run_dir, checkpoint_dir="checkpoints"):
    config = TrainConfig(run_dir=str(run_dir), checkpoint_dir=str(checkpoint_dir))
    with pytest.raises(ConfigError, match="HINT") as told:
        experiment.prepare(config)
    return str(told.value)


def test_a_file_and_a_circle_of_links_are_no_run_folders(tmp_path, file):
    for run_dir in (file, file / "a/b"):
        assert refused(run_dir).startswith(f"TrainConfig: run_dir={run_dir}: {file} is no folder.")
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert "circle is no folder" in refused(circle / "run")


def test_a_checkpoint_folder_that_is_a_file_is_refused(tmp_path, file):
    assert f"{file} is no folder" in refused(tmp_path / "run", file)


@pytest.mark.parametrize("folder", ["/", "."])
def test_a_folder_that_holds_other_things_and_no_run_is_refused(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError) as told:
        RunFolder(Path(folder)).refuse_unusable()
    assert told.value.key == "run_dir"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "there",
    [
        [],
        [".hidden", "lost+found", "logs", "slurm-7.out"],
        ["mine", "config.yaml"],
        ["mine", "kept/steps/"],  # a run that saved checkpoints only
    ],
)
def test_a_new_folder_and_that_of_a_run_are_taken(tmp_path, there):
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    RunFolder(tmp_path, "kept/steps").refuse_unusable()
    RunFolder(tmp_path / "new").refuse_unusable()
