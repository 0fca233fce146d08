"""Sinks: no record is lost or duplicated by a restart, and no sink can stop or slow training."""

import errno
import json
import math
import sqlite3
import struct
import sys
import threading
import time
from unittest.mock import Mock, call

import numpy as np
import pytest

from cyxjax.errors import ConfigError
from cyxjax.files import read_json_lines
from cyxjax.observe import MultiSink, NullSink, build_sinks, tracker_sinks
from cyxjax.observe.sinks import BackgroundSink, CsvSink, GuardedSink, JsonlSink
from tests.support import brought
from tests.support.programs import printed_by
from tests.support.waiting import until


def log_all(sink, *records):
    for record in records:
        sink.log(record)
    sink.close()


def test_jsonl_is_on_disk_after_each_line_and_a_resumed_one_repeats_no_step(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    sink.log({"kind": "step", "step": 10, "loss": np.float32(0.5), "skipped": np.bool_(True)})
    sink.log({"step": 20, "loss": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "step", "step": 10, "loss": 0.5, "skipped": True},
        {"step": 20, "loss": "nan"},
    ]
    log_all(sink, {"step": 30})
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # torn by a crash
    log_all(JsonlSink(path, resume_step=20), {"step": 30}, {"step": 40})
    assert [r["step"] for r in read_json_lines(path)] == [10, 20, 30, 40]
    log_all(JsonlSink(path, resume_step=0), {"step": 1})  # a new run puts the file aside
    assert read_json_lines(path) == [{"step": 1}]
    assert len(read_json_lines(tmp_path / "m.jsonl.old")) == 4


def test_csv_widens_and_resumes(tmp_path):
    path = tmp_path / "m.csv"
    rows = {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "note": 'a "quoted", text'}, {"step": 3}
    log_all(CsvSink(path), *rows)
    assert path.read_text().splitlines() == ["step,loss,note", "1,0.5,", '2,0.25,"a ""quoted"", text"', "3,,"]
    log_all(CsvSink(path, resume_step=1), {"step": 2, "loss": 0.125})
    with path.open("a") as file:
        file.write("3,0.4")  # of 0.43: torn by a crash
    log_all(CsvSink(path, resume_step=3), {"step": 4, "loss": 0.0625})
    assert path.read_text().splitlines() == ["step,loss", "1,0.5", "2,0.125", "4,0.0625"]


@pytest.mark.parametrize("kind", [GuardedSink, BackgroundSink])
def test_a_broken_sink_is_told_once_and_left_out(kind):
    broken = Mock(log=Mock(side_effect=OSError(5, "Input/output error")))
    lines, good = [], Mock()
    log_all(MultiSink([kind("wandb", lambda: broken, lines.append), good]), *({"step": n} for n in range(20)))
    (line,) = lines
    assert "wandb" in line
    assert "OSError: [Errno 5] Input/output error" in line
    assert good.log.call_count == 20
    assert good.close.called


@pytest.mark.parametrize("kind", [GuardedSink, BackgroundSink])
def test_records_wait_while_the_disk_is_full(kind):
    full = OSError(errno.ENOSPC, "No space left on device")
    disk, lines = Mock(log=Mock(side_effect=[None, full, full, *[None] * 4, *[full] * 3])), []
    log_all(kind("jsonl", lambda: disk, lines.append), *({"step": n} for n in range(7)))
    steps = [one.args[0]["step"] for one in disk.log.mock_calls]
    assert steps == [0, 1, 1, 1, 2, 3, 4, 5, 5, 5]
    assert ["No space left on device" in lines[0], "last 2" in lines[1], len(lines)] == [True, True, 2]
    assert disk.close.called


def test_background_delivers_in_order_and_closes():
    inner = Mock()
    sink = BackgroundSink("x", lambda: inner, pytest.fail)
    record = {"step": 0}
    for step in range(50):
        record["step"] = step  # the caller reuses its dict
        sink.log(record)
    sink.close()
    assert inner.mock_calls == [*(call.log({"step": step}) for step in range(50)), call.close()]
    assert not [t for t in threading.enumerate() if t.name == "cyxjax-sink-x"]


def test_a_stuck_sink_holds_nothing_up():
    release, lines = threading.Event(), []
    stuck = Mock(log=lambda record: release.wait())
    start = time.monotonic()
    sink = BackgroundSink("wandb", lambda: stuck, lines.append, depth=4, stuck_s=0.1)
    log_all(sink, *({"step": n} for n in range(1000)))
    assert time.monotonic() - start < 5  # else 1000 records would wait forever, and close 30 s
    assert [("too slow" in line, "did not finish" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
    release.set()


def test_build_sinks(tmp_path):
    assert isinstance(build_sinks(["jsonl"], tmp_path, is_master=False), NullSink)
    assert isinstance(build_sinks([], tmp_path, is_master=True), NullSink)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="sinks: .*'wandbb'.*'wandb'"):
        build_sinks(["wandbb"], tmp_path, is_master=True)
    log_all(build_sinks(["jsonl", "csv"], tmp_path, is_master=True), {"step": 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_a_sink_of_your_own_has_each_record_as_it_is_when_log_returns(tmp_path, monkeypatch):
    own, record = Mock(), {"step": 1, "loss": math.inf}
    monkeypatch.setattr(brought, "Lines", lambda folder: own)
    build_sinks([f"{brought.__name__}:Lines"], tmp_path, is_master=True).log(record)
    own.log.assert_called_once_with(record)


@pytest.mark.parametrize("name", ["jsonl", "wandb", "tensorboard", "mlflow", "trackio"])
def test_a_sink_that_cannot_open_is_one_warning(tmp_path, monkeypatch, name):
    (tmp_path / "file").touch()  # a file in place of the run folder
    modules = {"tensorboard": "tensorboardX", "mlflow": "mlflow.tracking"}
    monkeypatch.setitem(sys.modules, modules.get(name, name), None)
    lines = []
    log_all(
        build_sinks([name], tmp_path / "file", is_master=True, warn=lines.append), {"step": 1, "loss": 0.5}
    )
    assert len(lines) == 1
    assert f"sink {name} " in lines[0]
    assert name == "jsonl" or f"'cyxjax[{name}]'" in lines[0]


def tracked(name, folder, resume_step, *records, **config):
    options = {"config": config, "resume_step": resume_step, "warn": pytest.fail}
    log_all(build_sinks([name], folder, is_master=True, **options), *records)


def events_of(folder):
    """(step, tag) of the events in TensorBoard's files, and where parts begin; parses the records by hand."""
    from tensorboardX.proto.event_pb2 import Event

    found, started = [], []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (length,) = struct.unpack("<Q", raw[at : at + 8])
            event = Event.FromString(raw[at + 12 : at + 12 + length])
            found += [(event.step, value.tag) for value in event.summary.value]
            started += [event.step] if event.session_log.status else []
            at += 16 + length
    return found, started


def test_tensorboard_shows_numbers_and_goes_on(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'cyxjax[tensorboard]'")
    tracked("tensorboard", tmp_path, None, {"kind": "step", "step": 3, "loss": 0.5})
    tracked("tensorboard", tmp_path, 2, {"step": 4, "loss": 0.25})
    found, started = events_of(tmp_path / "tensorboard")
    assert sorted(found) == [(3, "loss"), (4, "loss")]
    assert started == [3]  # from this step the events of the first part are hidden
    open_sink = tracker_sinks.TensorBoardSink(tmp_path / "killed")
    for step in (3, 4):
        open_sink.log({"step": step, "loss": 0.5})
    assert until(lambda: len(events_of(tmp_path / "killed")[0]) == 2, 30)
    open_sink.close()


@pytest.mark.filterwarnings("ignore")  # of its own, about the store and about what it imports
def test_mlflow_keeps_a_run_in_the_folder_and_goes_on_with_it(tmp_path):
    pytest.importorskip("mlflow", reason="pip install 'cyxjax[mlflow]'")
    from mlflow.tracking import MlflowClient

    many = {f"option_{n}": str(n) for n in range(120)}  # MLflow accepts a hundred per call
    config = {"epochs": 2, "optimizer": {"lr": 0.1}, **many}
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        records = [{"kind": "step", "step": n, "loss": 1 / n + (resume_step or 0)} for n in steps]
        tracked("mlflow", tmp_path, resume_step, *records, **config)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("cyxjax").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"epochs": "2", "optimizer.lr": "0.1", **many}
    curve = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert curve == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 2.25)]  # no step twice


@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_trackio_keeps_one_run_that_goes_on(tmp_path):
    pytest.importorskip("trackio", reason="pip install 'cyxjax[trackio]'")
    program = tmp_path / "job.py"  # a separate process: trackio reads TRACKIO_DIR at import
    program.write_text(TRACKIO_JOB)
    for resume_step in ("", "3"):
        printed_by(program, tmp_path / "digits", resume_step, TRACKIO_DIR=tmp_path / "store")
    name = json.loads((tmp_path / "digits" / "trackio_id.json").read_text())["id"]
    with sqlite3.connect(tmp_path / "store" / "cyxjax.db") as store:
        logged = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
        kept = [json.loads(row[0]) for row in store.execute("select config from configs")]
    assert name.startswith("digits-")
    assert {run for run, *_ in logged} == {name}
    assert [(step, json.loads(row)["loss"]) for _, step, row in logged] == [(1, 1.0), (2, 0.5), (4, 0.25)]
    assert [config["optimizer.lr"] for config in kept] == ["0.1"]


TRACKIO_JOB = """
import sys
from tests.unit.observe.test_sinks import tracked

resume_step = int(sys.argv[2]) if sys.argv[2] else None
steps = (4,) if resume_step else (1, 2)
records = [{"kind": "step", "step": step, "loss": 1 / step} for step in steps]
tracked("trackio", sys.argv[1], resume_step, *records, optimizer={"lr": 0.1})
"""


def test_wandb_offline_writes_into_the_run_folder_and_resumes(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'cyxjax[wandb]'")
    ids = []
    for resume_step in (None, 1, 0):
        # back to step 2: wandb drops what is logged at an earlier step
        records = [{"step": step, "loss": 0.7 / step} for step in (1, 4, 8, 3, 5)]
        tracked("wandb", tmp_path, resume_step, *records, wandb={"mode": "offline"})
        ids.append(json.loads((tmp_path / "wandb_id.json").read_text())["id"])
    parts = [p.name.split("-")[3] for p in (tmp_path / "wandb").glob("offline-run-*")]  # of one second: ID-1
    assert sorted(parts) == sorted(ids)
    assert ids[0] == ids[1] != ids[2]  # a sync joins the parts of the first run, and no other run
    assert not list((tmp_path / "wandb").glob("run-*"))
    numbers = [repr(record["loss"]).encode() for record in records]
    for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        # a process of wandb's own writes it, also after its run has finished
        assert until(lambda path=path: all(number in path.read_bytes() for number in numbers), 30)
