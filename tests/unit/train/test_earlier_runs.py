"""Unfinished run folders of cyxjax 0.2.0 can be resumed, audited, reported, compared and evaluated.

tests/data/run_folder_0_2_0 (one process, format 2) was stopped after 34 of its 40 steps,
run_folder_0_2_0_shares (two processes under fsdp, format 3) after 18 of 20. The expected losses are those of
complete runs by 0.2.0.
"""

import json
import shutil
from pathlib import Path

import jax
import pytest

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.cli import main
from cyxjax.distributed import process_group
from tests.support.programs import printed_by

DATA = Path(__file__).parents[2] / "data"
PLAIN, SHARES = "run_folder_0_2_0", "run_folder_0_2_0_shares"
WHOLE = {  # train_losses, val_losses
    PLAIN: ([2.2610237, 2.1926406], [2.2246132, 2.1652574]),
    SHARES: ([2.2708639, 2.2293796], [2.2482293, 2.2123328]),
}


@pytest.fixture(autouse=True)
def as_a_program():
    """jax's default dtype promotion (Adam needs it), and a separate group for each test."""
    with jax.numpy_dtype_promotion("standard"):
        yield
    process_group.finalize()


@pytest.fixture(params=[PLAIN, SHARES])
def run(request, cwd):
    """The folder of a stopped run, at the path in its configuration."""
    name = {PLAIN: "plain", SHARES: "shares"}[request.param]
    return Path(shutil.copytree(DATA / request.param, Path("runs") / name))


def data_of(run):
    return PLAIN if run.name == "plain" else SHARES


def test_it_trains_on_from_its_own_configuration_to_the_losses_of_a_whole_run(run):
    stopped = list_steps(run / "checkpoints")[-1]
    devices = "1" if run.name == "plain" else "2"
    command = ["--config", run / "config.yaml", "--max-steps", "none", "--cpu-devices", devices]
    assert f"step {stopped} " in printed_by("-m", "cyxjax.train", *command)
    history = json.loads((run / "history.json").read_text())
    train, val = WHOLE[data_of(run)]
    assert history["train_losses"] == pytest.approx(train, rel=1e-5)
    assert history["val_losses"] == pytest.approx(val, rel=1e-5)
    assert main.main(["audit", str(run)]) == 0


def test_every_command_reads_it(run, capsys):
    step = list_steps(run / "checkpoints")[-1]
    manifest = read_manifest(step_folder(run / "checkpoints", step))
    assert manifest.format_version == {PLAIN: (2, 0), SHARES: (3, 0)}[data_of(run)]
    assert manifest.versions["cyxjax"] == "0.2.0"
    for words in (["audit"], ["checkpoint", "verify"], ["hash"], ["report"], ["evaluate"]):
        assert main.main([*words, str(run)]) == 0
    shown = capsys.readouterr().out
    assert (run / "report.html").is_file()
    assert f"step {step}" in shown
    assert {PLAIN: "loss 2.1824", SHARES: "loss 2.2195"}[data_of(run)] in shown
