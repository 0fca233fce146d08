"""Trackers that come as extras: what they write, and that a missing one is a warning."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from cyxjax.observe import build_sinks
from cyxjax.observe.records import Histogram, Image, Text, histogram, is_png, pictures, png

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
RICH = {
    "kind": "samples",
    "step": 3,
    "picture": Image(PIXELS, "a <b>"),
    "words": Text("one\n<two>"),
    "spread": Histogram(np.array([1, 0, 3]), np.array([0.0, 1.0, 2.0, 3.0])),
}


def unpacked(raw):
    """The pixels of a PNG whose rows have no filter: by another way than it was made."""
    data, at = b"", 8
    while at < len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        kind, body = raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]
        assert struct.unpack(">I", raw[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        if kind == b"IHDR":
            width, height = struct.unpack(">II", body[:8])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_pictures_are_grey_or_coloured_and_their_files_hold_them():
    drawn = pictures(np.array([0.0, 1.0, 2.0, 4.0]).reshape(1, 2, 2, 1))
    assert drawn.tolist() == [[[[0] * 3, [64] * 3], [[128] * 3, [255] * 3]]]
    assert pictures(np.zeros((2, 300, 100, 3))).shape == (2, 75, 25, 3)
    assert is_png(png(PIXELS))
    np.testing.assert_array_equal(unpacked(png(PIXELS)), PIXELS)
    assert histogram(np.array([0.0, np.nan, 1.0]), 2).counts.tolist() == [1, 1]


def test_files_leave_out_what_they_cannot_hold(tmp_path):
    sink = build_sinks(["jsonl", "csv"], tmp_path, is_master=True, warn=pytest.fail)
    sink.log(RICH)
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"kind": "samples", "step": 3}
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["kind,step", "samples,3"]


def events_of(folder):
    """(step, tag, kind of value) of what TensorBoard's files hold, their framing read by hand."""
    from tensorboardX.proto.event_pb2 import Event

    found, begun = [], []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (length,) = struct.unpack("<Q", raw[at : at + 8])
            event = Event.FromString(raw[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.WhichOneof("value")) for value in event.summary.value]
            begun += [event.step] if event.session_log.status else []
            at += 16 + length
    return found, begun


def test_tensorboard_shows_pictures_texts_and_histograms_and_goes_on(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'cyxjax[tensorboard]'")
    for resume_step, record in ((None, RICH), (2, {"step": 4, "loss": 0.5})):
        sink = build_sinks(
            ["tensorboard"], tmp_path, is_master=True, resume_step=resume_step, warn=pytest.fail
        )
        sink.log(record)
        sink.close()
    found, begun = events_of(tmp_path / "tensorboard")
    assert set(found) == {
        (3, "picture", "image"),
        (3, "picture/caption/text_summary", "tensor"),
        (3, "words/text_summary", "tensor"),
        (3, "spread", "histo"),
        (4, "loss", "simple_value"),
    }
    assert begun == [3]  # from here on what the first part logged is hidden


@pytest.mark.filterwarnings("ignore")  # of its own, about the store and about what it imports
def test_mlflow_keeps_a_run_in_the_folder_and_goes_on_with_it(tmp_path):
    pytest.importorskip("mlflow", reason="pip install 'cyxjax[mlflow]'")
    from mlflow.tracking import MlflowClient

    many = {f"option_{n}": str(n) for n in range(120)}  # MLflow takes a hundred in a call
    config = {"epochs": 2, "optimizer": {"lr": 0.1}, **many}
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        sink = build_sinks(
            ["mlflow"], tmp_path, is_master=True, config=config, resume_step=resume_step, warn=pytest.fail
        )
        for step in steps:
            sink.log({"kind": "step", "step": step, "loss": 1 / step + (resume_step or 0)})
        if resume_step:
            sink.log(RICH)
        sink.close()
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("cyxjax").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"epochs": "2", "optimizer.lr": "0.1", **many}
    curve = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert curve == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 2.25)]  # no step twice
    kept = {
        f.path
        for part in ("images", "texts", "histograms")
        for f in client.list_artifacts(run.info.run_id, part)
    }
    assert kept == {
        "images/picture_step_3.png",
        "images/picture_step_3.txt",
        "texts/words_step_3.txt",
        "histograms/spread_step_3.json",
    }


@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_trackio_keeps_one_run_that_goes_on(tmp_path):
    pytest.importorskip("trackio", reason="pip install 'cyxjax[trackio]'")
    program = tmp_path / "job.py"  # a process of its own: trackio reads TRACKIO_DIR when it is imported
    program.write_text(TRACKIO_JOB)
    for resume_step in ("", "3"):
        command = [sys.executable, program, tmp_path / "digits", resume_step]
        subprocess.run(command, env=os.environ | {"TRACKIO_DIR": str(tmp_path / "store")}, check=True)
    name = json.loads((tmp_path / "digits" / "trackio_id.json").read_text())["id"]
    with sqlite3.connect(tmp_path / "store" / "cyxjax.db") as store:
        logged = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
        kept = [json.loads(row[0]) for row in store.execute("select config from configs")]
    assert name.startswith("digits-")
    assert {run for run, *_ in logged} == {name}
    steps = [(step, json.loads(metrics)) for _, step, metrics in logged]
    assert [(step, told["loss"]) for step, told in steps if "loss" in told] == [(1, 1.0), (2, 0.5), (4, 0.25)]
    (rich,) = [told for step, told in steps if step == 3]
    kinds = {key: rich[key]["_type"] for key in ("picture", "words", "spread")}
    assert kinds == {"picture": "trackio.image", "words": "trackio.markdown", "spread": "trackio.histogram"}
    assert [config["optimizer.lr"] for config in kept] == ["0.1"]


TRACKIO_JOB = """
import sys
import pytest
from cyxjax.observe import build_sinks
from tests.unit.observe.test_tracking import RICH

resume_step = int(sys.argv[2]) if sys.argv[2] else None
config = {"optimizer": {"lr": 0.1}}
sink = build_sinks(["trackio"], sys.argv[1], True, config, resume_step=resume_step, warn=pytest.fail)
for step in (4,) if resume_step else (1, 2):
    sink.log({"kind": "step", "step": step, "loss": 1 / step})
if not resume_step:
    sink.log(RICH)
sink.close()
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("wandb", "wandb"),
        ("tensorboard", "tensorboardX"),
        ("mlflow", "mlflow.tracking"),
        ("trackio", "trackio"),
    ],
)
def test_a_missing_tracker_is_one_warning(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    said = []
    sink = build_sinks([name], tmp_path, is_master=True, warn=said.append)
    sink.log({"step": 1, "loss": 0.5})
    sink.close()
    assert len(said) == 1
    assert f"sink {name} " in said[0]
    assert f"'cyxjax[{name}]'" in said[0]


def test_wandb_offline_writes_into_the_run_folder_and_resumes(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'cyxjax[wandb]'")
    config = {"epochs": 1, "wandb": {"project": "cyxjax-test", "mode": "offline"}}
    for resume_step in (None, 1):
        sink = build_sinks(
            ["wandb"], tmp_path, is_master=True, config=config, resume_step=resume_step, warn=pytest.fail
        )
        sink.log({"kind": "step", "step": 1, "loss": 0.5})
        sink.log(RICH)
        sink.close()
    kinds = {p.suffix for p in (tmp_path / "wandb").glob("offline-run-*/files/media/**/*") if p.is_file()}
    assert kinds == {".png", ".html"}  # a histogram stands among the numbers
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
