"""Sinks: nothing lost, nothing twice after a restart, and no sink can stop or slow training."""

import json
import threading
import time

import numpy as np
import pytest

from cyxjax.errors import ConfigError
from cyxjax.files import read_json_lines
from cyxjax.observe import MultiSink, NullSink, build_sinks
from cyxjax.observe.file_sinks import CsvSink, JsonlSink
from cyxjax.observe.sinks import BackgroundSink, GuardedSink


class ListSink:
    def __init__(self):
        self.records, self.closed = [], False

    def log(self, record):
        self.records.append(dict(record))

    def close(self):
        self.closed = True


class BrokenSink(ListSink):
    def log(self, record):
        raise OSError(28, "No space left on device")


def test_jsonl_is_on_disk_after_each_line(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log({"kind": "step", "step": 1, "loss": np.float32(0.5), "skipped": np.bool_(True)})
    sink.log({"step": 2, "loss": float("nan")})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()  # before close
    assert [json.loads(line) for line in lines] == [
        {"kind": "step", "step": 1, "loss": 0.5, "skipped": True},
        {"step": 2, "loss": "nan"},
    ]
    sink.close()


def test_a_resumed_jsonl_repeats_no_step(tmp_path):
    path = tmp_path / "m.jsonl"
    first = JsonlSink(path)
    for step in (10, 20, 30):
        first.log({"step": step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # torn by a crash
    again = JsonlSink(path, resume_step=20)
    for step in (30, 40):
        again.log({"step": step})
    again.close()
    assert [r["step"] for r in read_json_lines(path)] == [10, 20, 30, 40]


def test_a_new_run_puts_the_old_file_aside(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.log({"step": step})
        sink.close()
    assert read_json_lines(path) == [{"step": 2}]
    assert read_json_lines(tmp_path / "m.jsonl.old") == [{"step": 1}]


def test_csv_widens_and_resumes(tmp_path):
    path = tmp_path / "m.csv"
    sink = CsvSink(path)
    sink.log({"step": 1, "loss": 0.5})
    sink.log({"step": 2, "loss": 0.25, "note": 'a "quoted", text'})
    sink.log({"step": 3})
    sink.close()
    assert path.read_text().splitlines() == ["step,loss,note", "1,0.5,", '2,0.25,"a ""quoted"", text"', "3,,"]
    again = CsvSink(path, resume_step=1)
    again.log({"step": 2, "loss": 0.125})
    assert path.read_text().splitlines() == ["step,loss", "1,0.5", "2,0.125"]


def test_a_broken_sink_is_told_once_and_left_out():
    said, good = [], ListSink()
    sink = MultiSink([GuardedSink("csv", BrokenSink, said.append), good])
    for step in range(3):
        sink.log({"step": step})
    sink.close()
    assert said == [
        "WARNING: metrics sink csv failed and is disabled: OSError: [Errno 28] No space left on device"
    ]
    assert len(good.records) == 3
    assert good.closed


def test_background_delivers_in_order_and_closes():
    inner = ListSink()
    sink = BackgroundSink("x", lambda: inner, pytest.fail)
    record = {"step": 0}
    for step in range(50):
        record["step"] = step  # the caller reuses its dict
        sink.log(record)
    sink.close()
    assert [r["step"] for r in inner.records] == list(range(50))
    assert inner.closed
    assert not [t for t in threading.enumerate() if t.name == "cyxjax-sink-x"]


def test_background_error_is_one_warning():
    said = []
    sink = BackgroundSink("wandb", BrokenSink, said.append)
    for step in range(20):
        sink.log({"step": step})
    sink.close()
    assert len(said) == 1
    assert "metrics sink wandb failed and is disabled: OSError" in said[0]


def test_a_stuck_sink_holds_nothing_up():
    release, said = threading.Event(), []

    class Stuck(ListSink):
        def log(self, record):
            release.wait()

    sink = BackgroundSink("wandb", Stuck, said.append, depth=4, close_s=0.1)
    start = time.monotonic()
    for step in range(1000):
        sink.log({"step": step})
    sink.close()
    assert time.monotonic() - start < 5  # 1000 records would wait for ever
    assert sink.num_dropped >= 990
    assert [("too slow" in line, "did not finish" in line) for line in said] == [(True, False), (False, True)]
    release.set()


def test_build_sinks(tmp_path):
    assert isinstance(build_sinks(["jsonl"], tmp_path, is_master=False), NullSink)
    assert isinstance(build_sinks([], tmp_path, is_master=True), NullSink)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="sinks: .*'wandbb'.*'wandb'"):
        build_sinks(["wandbb"], tmp_path, is_master=True)
    sink = build_sinks(["jsonl", "csv"], tmp_path, is_master=True)
    sink.log({"step": 1})
    sink.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_a_file_sink_that_cannot_open_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    sink = build_sinks(["jsonl"], tmp_path / "file", is_master=True, warn=said.append)
    sink.log({"step": 1})
    sink.close()
    assert len(said) == 1
    assert "metrics sink jsonl failed" in said[0]
