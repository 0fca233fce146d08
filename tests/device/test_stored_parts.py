"""Every command can use the files of a run with a sharded state, on a different number of devices."""

import json
import os
from unittest import mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import cyxjax as cx
from cyxjax.config.experiment import TrainConfig
from cyxjax.distributed import process_group
from cyxjax.train import experiment
from tests.support.trainers import command

ROWS = np.random.default_rng(5).normal(size=(5, 4)).astype(np.float32)
VALUES = {
    "epochs": 2,
    "batch_size": 4,
    "model": {"name": "tests.support.brought:Net", "options": {"width": 3}},
    "data": {"name": "tests.support.brought:data"},
    "optimizer": {"name": "momentum", "lr": 0.1},
    "verbose": False,
    "offload": "optimizer",
}


@pytest.fixture(
    scope="module",
    params=["fsdp", pytest.param("zero1", marks=pytest.mark.slow)],
)
def run(request, tmp_path_factory):
    """(folder of a run over three devices, its trainer's predictions for ROWS and its test metrics)."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    with mock.patch.dict(os.environ), cx.testing.devices(3):  # which divide no leaf
        with mock.patch.object(process_group, "init"):
            ready = experiment.prepare(TrainConfig(run_dir=str(folder), comm=request.param, **VALUES))
        experiment.train(ready)
        results = ready.trainer.predict(ROWS), ready.trainer.evaluate_metrics(ready.splits.test)
        params = ready.trainer.params
    return folder, params, *results


def test_it_is_loaded_whole_on_other_devices_and_trains_on(run, two_devices):
    folder, params, outputs, measured = run
    found = cx.load_run(folder)
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    np.testing.assert_allclose(found.predict(ROWS), outputs, rtol=1e-5)
    np.testing.assert_allclose(found.forward(ROWS), outputs, rtol=1e-5)
    assert found.evaluate() == pytest.approx(measured, rel=1e-5)


def test_every_command_takes_it(run, two_devices, tmp_path, capsys):
    folder, params, outputs, measured = run
    np.save(tmp_path / "x.npy", ROWS)
    assert command("predict", folder, tmp_path / "x.npy", tmp_path / "y.npy") == 0
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), outputs, rtol=1e-5)
    capsys.readouterr()
    assert command("evaluate", folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(measured["loss"], rel=1e-5)
    assert command("export", folder, tmp_path / "w.safetensors") == 0
    whole = load_file(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(whole["params/Dense_0/kernel"], params["Dense_0"]["kernel"])
    assert command("export", folder, tmp_path / "p.hlo", "--to", "stablehlo") == 0
    program = jax.export.deserialize(bytearray((tmp_path / "p.hlo").read_bytes()))
    np.testing.assert_allclose(program.call(ROWS), outputs, rtol=1e-5)
    for word in ("audit", "report", "hash"):
        assert command(word, folder) == 0
    assert command("checkpoint", "verify", folder) == 0
    assert command("checkpoint", "export", folder, tmp_path / "c.safetensors") == 0
    stored = load_file(tmp_path / "c.safetensors")
    np.testing.assert_array_equal(stored["params/Dense_0/kernel"], whole["params/Dense_0/kernel"])
    capsys.readouterr()
    assert command("plan", "--config", folder / "config.yaml", "--run-dir", tmp_path / "none") == 0
    shown = capsys.readouterr().out
    assert "offload: optimizer" in shown
    assert "waiting in the host's memory" in shown
    assert not (tmp_path / "none").exists()
