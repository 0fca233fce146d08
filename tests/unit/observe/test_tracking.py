"""Trackers that come as extras: what they write, and that a missing one is a warning."""

import json
import sys

import pytest

from cyxjax.observe import build_sinks


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_missing_tracker_is_one_warning(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    said = []
    sink = build_sinks([name], tmp_path, is_master=True, warn=said.append)
    sink.log({"step": 1, "loss": 0.5})
    sink.close()
    assert len(said) == 1
    assert f"{module} is not installed. HINT: pip install 'cyxjax[{name}]'" in said[0]


def test_wandb_offline_writes_into_the_run_folder_and_resumes(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'cyxjax[wandb]'")
    config = {"epochs": 1, "wandb": {"project": "cyxjax-test", "mode": "offline"}}
    for resume_step in (None, 1):
        sink = build_sinks(
            ["wandb"], tmp_path, is_master=True, config=config, resume_step=resume_step, warn=pytest.fail
        )
        sink.log({"kind": "step", "step": 1, "loss": 0.5})
        sink.close()
    run_id = json.loads((tmp_path / "wandb_id.json").read_text())["id"]
    parts = [p.name for p in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(parts) == 2
    assert all(run_id in name for name in parts)  # one run id, so that a sync joins the two parts
    assert not list((tmp_path / "wandb").glob("run-*"))


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'cyxjax[tensorboard]'")
    sink = build_sinks(["tensorboard"], tmp_path, is_master=True, warn=pytest.fail)
    sink.log({"kind": "step", "step": 3, "loss": 0.5})
    sink.close()
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()
    assert b"kind" not in events.read_bytes()
