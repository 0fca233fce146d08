"""What scripts/bench/plan.py makes of its runs: a table, and the file that `cyxjax plan` reads."""

import importlib
from pathlib import Path

import pytest

from cyxjax.observe import scaling

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
ROWS = [("mlp", "mean", 2, 0.0015, 0.001), ("mlp", "zero1", 4, 0.00123456, 0.002)]


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("plan")


def test_rows_are_what_the_plan_reads(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "FILE", tmp_path / "model_error.json")
    plan.write(scaling.FILE, ROWS, {"bytes_per_s": 1e9, "latency_s": 1e-5})
    machine, runs = scaling.measured_runs()
    assert machine == plan.peers.machine()
    assert [tuple(run) for run in runs] == [ROWS[0], ("mlp", "zero1", 4, 0.001235, 0.002)]
    assert plan.table(ROWS).splitlines()[2] == "| mlp | mean | 2 | 1.50 ms | 1.00 ms | +50% |"


def test_processes_beyond_the_cores_compute_longer(plan, monkeypatch):
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 2)
    waits = [plan.waiting_for_cores({"compute_s": 3.0}, processes) for processes in plan.PROCESSES]
    assert waits == [0.0, 0.0, 3.0]


def test_the_last_line_is_read_behind_its_rank(plan):
    assert plan.told('noise {"a": 1}\n[rank 0] {"b": 2}\n') == {"b": 2}
