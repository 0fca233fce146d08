"""`profile: FIRST:STOP`: the page of a trace, and the steps that are traced."""

from unittest.mock import create_autospec

import pytest

from cyxjax.observe.profile import Op, busy_s, page
from cyxjax.train.hooks import profile
from cyxjax.train.hooks.hook import Position, RunState
from cyxjax.train.hooks.profile import ProfileHook


def at(step):
    return RunState(Position(step, 0, step, step), None, None)


def test_a_run_that_is_resumed_ends_inside_or_never_comes_there_is_told(tmp_path, monkeypatch):
    messages, tracing = [], create_autospec(profile.Tracing)
    monkeypatch.setattr(profile, "Tracing", tracing)
    tracing.return_value.stop.side_effect = lambda num_steps, spent: [f"{num_steps} steps"]
    hook = ProfileHook(2, 9, tmp_path, messages.append)
    hook.on_start(at(5))
    hook.on_end(at(7), False)
    assert messages.pop().startswith("Profile of steps 5 to 6: 2 steps")
    ProfileHook(10, 15, tmp_path, messages.append).on_end(at(8), True)
    assert messages.pop() == "WARNING: profile: the run ended at step 8, before step 10."
    late = ProfileHook(2, 4, tmp_path, messages.append)
    late.on_start(at(5))  # resumed after these steps: the loop is not held up at each of its own
    assert not late.wants_state(Position(6), False)
    late.on_end(at(6), True)
    assert messages == []


def test_the_page_counts_time_once_where_devices_work_side_by_side():
    # Device 0: 0-2 ms and 5-6 ms; device 1: 1-3 ms: 4 ms of 10 covered. All-reduce: 2 of 5 ms.
    ops = [
        Op("dot.1", "step", 0, 2000),
        Op("all-reduce.3", "step", 1000, 2000),
        Op("add", "eval", 5000, 1000),
    ]
    assert busy_s(ops) == pytest.approx(0.004)
    lines = page(ops, 5, 0.010, 0.001, [0.5])
    assert "2.00 ms per step" in lines[0]
    # of 10 ms: the loop waited for data; no device worked; what collectives took, waiting included
    found = [line.split("%")[0].rsplit(maxsplit=1) for line in lines[1:4]]
    assert found == [["input wait", "10.0"], ["host gaps", "60.0"], ["collectives", "40.0"]]
    assert lines[6].split() == ["80.0%", "4.00", "ms", "2", "x", "step"]
    assert lines[-1] == "compiled in these steps: 1 programs, 0.5 s"


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    hook = ProfileHook(0, 1, tmp_path / "file" / "x", lambda line: None)
    hook.on_start(at(0))
    assert hook.wants_state(Position(1), False)  # as the ranks whose trace began
    hook.on_end(at(1), True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: no profile: ")
