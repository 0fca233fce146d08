"""`profile: FIRST:STOP`: a real trace of real programs, and the page of what it says."""

import jax
import jax.numpy as jnp
import pytest

from cyxjax.config.load import load_config
from cyxjax.errors import ConfigError
from cyxjax.observe.profile import Measured, Op, busy_s, group_page, page, read
from cyxjax.observe.profile import measured as measured_of
from cyxjax.train.hooks.hook import Position, RunState
from cyxjax.train.hooks.profile import ProfileHook


def at(step):
    return RunState(Position(step, 0, step, step), None, None)


def test_steps_are_traced_and_told_on_a_page(tmp_path):
    program = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    program(jnp.ones((8, 8))).block_until_ready()
    said = []
    hook = ProfileHook(2, 4, tmp_path, said.append)
    hook.on_start(at(0))
    for step in range(1, 7):
        size = 16 if step == 3 else 8  # in the window: the program must be made again
        program(jnp.ones((size, size))).block_until_ready()
        if hook.wants_state(Position(step), False):
            hook.on_state(at(step))
    hook.on_end(at(6), True)
    (line,) = said
    assert line.startswith("Profile of steps 2 to 3: 2 steps in ")
    assert (
        len(list(tmp_path.rglob("*.xplane.pb"))) == len(list(tmp_path.rglob("perfetto_trace.json.gz"))) == 1
    )
    assert {op.program for op in read(tmp_path)} >= {"jit__lambda"}
    told = (tmp_path / "summary.txt").read_text()
    assert "jit__lambda" in told
    assert "now f32[16,16] and before f32[8,8]" in told
    assert jax.config.jax_explain_cache_misses is False


def test_a_run_that_is_resumed_ends_inside_or_never_comes_there_is_told(tmp_path):
    said = []
    hook = ProfileHook(2, 9, tmp_path, said.append)
    hook.on_start(at(5))
    jax.jit(lambda x: x * 2)(1.0).block_until_ready()
    hook.on_end(at(7), False)
    assert said.pop().startswith("Profile of steps 5 to 6: 2 steps")
    ProfileHook(10, 15, tmp_path, said.append).on_end(at(8), True)
    assert said.pop() == "WARNING: profile: the run ended at step 8, before 10."
    late = ProfileHook(2, 4, tmp_path, said.append)
    late.on_start(at(5))  # resumed after these steps: the loop is not held up at each of its own
    assert not late.wants_state(Position(6), False)
    late.on_end(at(6), True)
    assert said == []


def test_the_page_counts_time_once_where_devices_work_side_by_side():
    # Device 0: 0-2 ms and 5-6 ms; device 1: 1-3 ms: 4 ms of 10 covered. All-reduce: 2 of 5 ms.
    ops = [
        Op("dot.1", "step", 0, 2000),
        Op("all-reduce.3", "step", 1000, 2000),
        Op("add", "eval", 5000, 1000),
    ]
    assert busy_s(ops) == pytest.approx(0.004)
    found = measured_of(ops, 5, 0.010, 0.001, [0.5])
    lines = page(found, ["x.py:1: now f32[4] and before f32[3]"])
    assert "2.00 ms a step" in lines[0]
    # of 10 ms: the loop waited for data; no device worked; what collectives took, waiting included
    found = [line.split("%")[0].rsplit(maxsplit=1) for line in lines[1:4]]
    assert found == [["input wait", "10.0"], ["host gaps", "60.0"], ["collectives", "40.0"]]
    assert lines[6].split() == ["80.0%", "4.00", "ms", "2", "x", "step"]
    assert lines[-2:] == [
        "compiled in these steps: 1 programs, 0.5 s",
        "  x.py:1: now f32[4] and before f32[3]",
    ]


def measured(seconds, wires_s, compiled=0, compiled_s=0.0):
    return Measured(
        steps=4,
        seconds=seconds,
        input_s=0.01,
        idle_s=0.02,
        wires_s=wires_s,
        total_s=0.08,
        compiled=compiled,
        compiled_s=compiled_s,
        programs={"step": (0.06, 4), "eval": (0.02, 1)},
        instructions={"dot": (0.08 - wires_s, 4), "all-reduce": (wires_s, 4)},
    )


def test_the_page_of_all_ranks_begins_with_those_that_are_waited_for():
    ranks = [measured(0.1, 0.04), measured(0.2, 0.004, compiled=1, compiled_s=0.5), "full disk"]
    lines = group_page(ranks)
    assert lines[0] == "3 processes, 4 steps, 50.00 ms a step on the slowest, rank 1 (tracing included)"
    assert lines[3:7] == [
        "rank   ms a step   input wait   host gaps   collectives   compiled",
        "   1       50.00         5.0%       10.0%          5.0%   1 in 0.5 s",
        "   0       25.00        10.0%       20.0%         50.0%   0 in 0.0 s",
        "rank 2: no profile: full disk",
    ]
    # both ranks: 0.12 of 0.16 s in `step`; dot 0.04 and 0.076, all-reduce 0.04 and 0.004
    assert lines[9].split() == ["75.0%", "60.00", "to", "60.00", "ms", "step"]
    assert lines[13].split() == ["72.5%", "40.00", "to", "76.00", "ms", "dot"]
    assert group_page(["a", "b"])[1:] == ["rank 0: no profile: a", "rank 1: no profile: b"]


def test_a_rank_without_a_trace_still_comes_to_the_others(tmp_path):
    told, said = [], []

    def exchange(mine):
        told.append(mine)
        return [measured(0.1, 0.04)._asdict(), mine]

    (tmp_path / "file").touch()
    hook = ProfileHook(0, 1, tmp_path / "file" / "x", said.append, exchange, tmp_path / "summary.txt")
    hook.on_start(at(0))
    hook.on_state(at(1))
    assert not hook.wants_state(Position(2), False)
    hook.on_end(at(1), True)
    (why,) = told
    assert said[0].startswith(f"WARNING: no profile: {why}.")
    assert said[1] == f"WARNING: rank 1: no profile: {why}"
    assert (tmp_path / "summary.txt").read_text().startswith("2 processes, 4 steps, 25.00 ms a step")
    assert said[2].startswith("Profile of steps 0 to 0: 2 processes, 4 steps")
    assert len(said) == 3


@pytest.mark.parametrize("steps", ["10", "a:b", "-1:5"])
def test_what_is_no_range_of_steps_is_refused(steps):
    assert load_config(["--profile", "10:15"]).profile == "10:15"
    with pytest.raises(ConfigError, match="profile"):
        load_config(["--profile", steps])
