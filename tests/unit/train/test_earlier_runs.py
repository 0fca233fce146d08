"""Unfinished run folders of cyxjax 0.2.0 can be resumed, audited, reported, compared and evaluated.

tests/data/run_folder_0_2_0 (one process, format 2) was stopped after 34 of its 40 steps,
run_folder_0_2_0_shares (two processes under fsdp, format 3) after 18 of 20. The expected losses are those of
complete runs by 0.2.0.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.cli import main
from cyxjax.distributed import process_group

DATA = Path(__file__).parents[2] / "data"


# devices: the fixture; shown: of the step at which it was stopped
RUNS = {
    "plain": SimpleNamespace(
        folder="run_folder_0_2_0",
        devices="one_device",
        format_version=(2, 0),
        train_losses=[2.2610237, 2.1926406],
        val_losses=[2.2246132, 2.1652574],
        shown="loss 2.1824",
    ),
    "shares": SimpleNamespace(
        folder="run_folder_0_2_0_shares",
        devices="two_devices",
        format_version=(3, 0),
        train_losses=[2.2708639, 2.2293796],
        val_losses=[2.2482293, 2.2123328],
        shown="loss 2.2195",
    ),
}


@pytest.fixture(params=RUNS)
def run(request, cwd):
    """The folder of a stopped run, at the path in its configuration."""
    request.getfixturevalue(RUNS[request.param].devices)
    process_group.finalize()  # the commands make their own
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it
        yield Path(shutil.copytree(DATA / RUNS[request.param].folder, Path("runs") / request.param))


def test_it_trains_on_from_its_own_configuration_to_the_losses_of_a_whole_run(run, printed):
    stopped = list_steps(run / "checkpoints")[-1]
    shown = printed(main.main, "train", "--config", run / "config.yaml", "--max-steps", "none")
    assert f"step {stopped} " in shown
    history = json.loads((run / "history.json").read_text())
    assert history["train_losses"] == pytest.approx(RUNS[run.name].train_losses, rel=1e-5)
    assert history["val_losses"] == pytest.approx(RUNS[run.name].val_losses, rel=1e-5)
    assert main.main(["audit", str(run)]) == 0


def test_every_command_reads_it(run, capsys):
    step = list_steps(run / "checkpoints")[-1]
    manifest = read_manifest(step_folder(run / "checkpoints", step))
    assert manifest.format_version == RUNS[run.name].format_version
    assert manifest.versions["cyxjax"] == "0.2.0"
    for words in (["audit"], ["checkpoint", "verify"], ["hash"], ["report"], ["evaluate"]):
        assert main.main([*words, str(run)]) == 0
    shown = capsys.readouterr().out
    assert (run / "report.html").is_file()
    assert f"step {step}" in shown
    assert RUNS[run.name].shown in shown
