"""A run folder whose files are FIFOs or contain nonsense: every command ends, with one line if it fails."""

import os
import shutil
from pathlib import Path
from unittest import mock

import jax
import pytest

from cyxjax.cli import main
from cyxjax.distributed import process_group
from tests.support.trainers import command

RUN = Path(__file__).parents[1] / "data" / "run_folder_0_2_0"
FILES = sorted(path.name for path in RUN.iterdir() if path.is_file())
NEEDED = {"config.yaml", "data.json", "ledger.jsonl"}  # by a resumed run
pytestmark = pytest.mark.timeout(60)  # a reader that waits for the other end waits forever
NONSENSE = {
    "goodput.json": '{"seconds": {"step": NaN}, "steps": NaN, "step": 1, "at_unix_s": 0, "ended": false}',
    "events.jsonl": '{"event": "start", "step": NaN}\n{"event": 7}\n[]\n',
    "metrics.jsonl": '{"kind": "step", "step": NaN}\n{"step": null}\n{"step": "x"}\n7\n',
    "metrics.csv": "kind,step\nstep,NaN\nstep,x\n\x00,\xff\n",
    "history.json": '{"train_losses": [NaN]}',
}


@pytest.fixture
def run(cwd, monkeypatch):
    init = process_group.init

    def of_one_device(**options):
        init()
        process_group.narrow(1)

    monkeypatch.setattr(process_group, "init", of_one_device)
    shutil.copy(RUN / "config.yaml", "whole.yaml")
    with mock.patch.dict(os.environ):  # `init` sets OMP_NUM_THREADS
        yield Path(shutil.copytree(RUN, Path("runs") / "plain"))
    process_group.finalize()


def trained_on():
    with jax.numpy_dtype_promotion("standard"):
        return command("train", "--config", "whole.yaml", "--max-steps", "36")


def replaced_by_a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def test_no_fifo_is_waited_for(run, capsys):
    for name in set(FILES) - NEEDED:
        replaced_by_a_fifo(run / name)
    assert trained_on() == 0
    printed = capsys.readouterr()
    for name in set(FILES) - NEEDED - {"config.yaml"}:  # config.yaml is rewritten
        assert name in printed.err + printed.out


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_fifo_that_a_run_needs_is_refused_by_name(run, name, capsys):
    replaced_by_a_fifo(run / name)
    assert trained_on() == 1
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_commands_do_not_wait_for_a_fifo(run, name, capsys):
    replaced_by_a_fifo(run / name)
    for word in ("audit", "hash", "report"):
        assert main.main([word, str(run)]) in (0, 1, 2)
        assert len(capsys.readouterr().err.splitlines()) <= 1


def test_nonsense_does_not_keep_a_run_from_going_on(run, capsys):
    for name, text in NONSENSE.items():
        (run / name).write_text(text, encoding="latin-1")
    assert main.main(["report", str(run)]) == 0
    capsys.readouterr()
    assert trained_on() == 0
    assert "Resuming from step 34" in capsys.readouterr().out
