"""`cyxjax init`: the new project trains without changes, and its own tests pass."""

import os
import sys

import jax
import pytest

from cyxjax.cli import init, main
from cyxjax.distributed import process_group
from tests.support.programs import fresh


@pytest.fixture
def project(tmp_path, monkeypatch, group):
    """A new project as the working folder; its imported modules are removed afterwards."""
    folder = tmp_path / "mine"
    assert main.main(["init", str(folder)]) == 0
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in init.FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_it_trains_at_once_and_its_own_tests_pass(project, capsys):
    import test_training

    with jax.numpy_dtype_promotion("standard"):
        code = main.main(["train", "--config", "config.yaml", "--fast-dev-run", "--sinks", "[]"])
        process_group.finalize()
        assert (code, "Test: loss" in capsys.readouterr().out) == (0, True)
        test_training.test_four_devices_train_as_one()
        test_training.test_it_learns()
    assert not process_group.is_initialized()


def test_a_path_that_the_terminal_cannot_show_is_shown_with_question_marks(tmp_path):
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = fresh("-m", "cyxjax", "init", tmp_path / "ü", env=ascii_only)
    assert (done.returncode, f"-> {tmp_path}/?\n" in done.stdout) == (0, True)


def test_nothing_is_overwritten(project, capsys):
    (project / "my_model.py").write_text("mine")
    assert main.main(["init", str(project)]) == 2
    message = capsys.readouterr().err
    assert "already contains my_model.py, my_data.py, config.yaml, test_training.py" in message
    assert message.count("\n") == 1
    assert (project / "my_model.py").read_text() == "mine"
