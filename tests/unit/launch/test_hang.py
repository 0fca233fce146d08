"""Heartbeats, and the blame that follows from them: only ranks that are stuck are named."""

import time
from contextlib import suppress

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch import heartbeat
from cyxjax.launch.backend import jax_private
from cyxjax.launch.heartbeat import Limits, Progress
from cyxjax.launch.supervise import hang
from cyxjax.launch.supervise.hang import Pauses, Stopwatch, judge, stragglers

LIMITS = Limits.parse("10,compile=100,checkpoint=60")


def blamed(pulses, now_s=100.0, limits=LIMITS, step_s=None, stopped=frozenset(), **more):
    verdict = judge(dict(enumerate(pulses)), now_s, limits, step_s, stopped, **more)
    return None if verdict is None else verdict.rank


AUTO = Limits.parse("auto")
BOTH = [Progress(30, "step", 100), Progress(30, "data", 100)]
CASES = {
    "one loads while the others wait": (
        [Progress(5, "step", 80), Progress(5, "data", 79), Progress(5, "step", 80)],
        {},
        1,
    ),
    "within the limit": ([Progress(5, "step", 95), Progress(5, "data", 94)], {}, None),
    "a long save excuses who waits": ([Progress(5, "checkpoint", 60), Progress(5, "step", 60)], {}, None),
    "a save beyond its limit": ([Progress(5, "checkpoint", 30), Progress(5, "step", 60)], {}, 0),
    "the first step compiles": ([Progress(0, "step", 30), Progress(0, "step", 30)], {}, None),
    "beyond that": ([Progress(0, "compile", 30), Progress(0, "compile", 30)], {"now_s": 300}, 0),
    "compilation has no limit": (
        [Progress(0, "step", 30), Progress(0, "step", 30)],
        {"now_s": 1e6, "limits": Limits.parse("10,compile=0")},
        None,
    ),
    "but the first batch has one": (
        [Progress(0, "step", 30), Progress(0, "data", 30)],
        {"now_s": 1e6, "limits": Limits.parse("10,compile=0")},
        1,
    ),
    # the lowest step holds them up
    "all wait": ([Progress(6, "step", 80), Progress(5, "step", 79.5)], {}, 1),
    "a long save that has just ended": ([Progress(6, "step", 99.7), Progress(6, "step", 55)], {}, None),
    "some wait for ranks of another host, one of which may save": (
        [Progress(6, "step", 80), Progress(5, "step", 79.5)],
        {"all_here": False},
        None,
    ),
    "one of several hosts loads": (
        [Progress(5, "step", 80), Progress(5, "data", 79)],
        {"all_here": False},
        1,
    ),
    "suspended": (
        [Progress(5, "step", 80), Progress(5, "step", 80.5)],
        {"stopped": frozenset({1})},
        1,
    ),
    "no reports": ([Progress(-1, "idle", 1), Progress()], {"now_s": 1e6}, None),
    "too few steps known": (BOTH, {"now_s": 1e5, "limits": AUTO}, None),
    "too few steps known, all in collectives": (
        [Progress(3, "collective", 80), Progress(3, "collective", 79)],
        {"now_s": 201, "limits": AUTO},
        1,
    ),
    "one works while the others are in collectives": (
        [Progress(3, "collective", 80), Progress(3, "idle", 79)],
        {"now_s": 1e5, "limits": AUTO},
        None,
    ),
    "20 steps": (BOTH, {"now_s": 290, "limits": AUTO, "step_s": 10.0}, None),
    "more than 20 steps": (BOTH, {"now_s": 301, "limits": AUTO, "step_s": 10.0}, 1),
    "short steps": (BOTH, {"now_s": 210, "limits": AUTO, "step_s": 0.01}, None),
}


@pytest.mark.parametrize(("pulses", "options", "rank"), CASES.values(), ids=CASES)
def test_the_rank_that_holds_up_the_others_is_blamed(pulses, options, rank):
    assert blamed(pulses, **options) == rank


def test_a_rank_that_ended_early():
    pulses = {0: Progress(5, "step", 50), 1: Progress(3, "done", 49)}
    verdict = judge(pulses, 60.0, Limits(0), None, frozenset())
    assert (verdict.rank, verdict.early_end) == (1, True)
    assert "rank 1 finished at step 3, but rank 0 cannot continue without it in step 5" in verdict.reason
    assert judge({**pulses, 0: Progress(5, "checkpoint", 50)}, 60.0, Limits(0), None, frozenset()) is None


def test_the_median_step_is_known_after_20():
    watch = Stopwatch()
    for step in range(25):
        assert watch.median_s == (4.0 if step > 20 else None)
        watch.see(Progress(step, "step", float(step * 4)))


def test_jaxs_heartbeats_end_nobody_whom_the_watchdog_still_waits_for():
    assert jax_private.HEARTBEAT_S > hang.SUSPENDED_S


@pytest.mark.parametrize("text", ["soon", "10,lunch=3", "-4", "compile="])
def test_limits_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="--hang-timeout"):
        Limits.parse(text)


def test_a_straggler_is_named_not_killed():
    before = {rank: Progress(0, "step", 1, busy_s=0) for rank in range(3)}
    now = {rank: Progress(10, "step", 9, busy_s=busy) for rank, busy in enumerate([1.0, 5.0, 1.2])}
    assert "rank 1 is slow: 500 ms per step outside the shared step, the others 120 ms" in (
        stragglers(before, now) or ""
    )
    assert stragglers(before, {**now, 1: Progress(10, "step", 9, busy_s=1.5)}) is None


def test_a_supervisor_that_was_suspended_excuses_everybody():
    pauses, late = Pauses(), Progress(30, "step", 100.0)
    pauses.see(100.0, ranks_stopped=False)
    pauses.see(145.0, ranks_stopped=False)  # it checks four times per second
    assert pauses.excuse(late).at_s == 145.0
    assert pauses.excuse(Progress(30, "step", 120.0)).at_s == 145.0
    assert pauses.excuse(Progress(31, "step", 146.0)).at_s == 146.0
    assert pauses.excuse(Progress()) == Progress()  # has not begun to report
    assert pauses.touches(late)  # its next beat counts 45 s of work in one step
    assert not pauses.touches(Progress(31, "step", 145.1))


@pytest.mark.parametrize(
    ("spans", "ticks", "excused_s"),
    [([(10, 1000)], 1000, hang.SUSPENDED_S), ([(10, 30), (60, 80)], 100, 40.0)],
    ids=["for five minutes", "time between two counts"],
)
def test_a_suspended_rank_is_excused_and_told_of_once_each_time(spans, ticks, excused_s):
    pauses = Pauses()
    begins = [
        pauses.see(tick * 1.0, ranks_stopped=any(a <= tick < b for a, b in spans)) for tick in range(ticks)
    ]
    assert [tick for tick, begin in enumerate(begins) if begin] == [a for a, _ in spans]
    assert pauses.excuse(Progress(5, "step", 10.0)).at_s == pytest.approx(10.0 + excused_s, abs=4)


def test_ranks_that_still_stand_when_their_supervisor_wakes_were_suspended_with_it():
    pauses = Pauses()
    pauses.see(100.0, ranks_stopped=False)
    assert not pauses.see(162.0, ranks_stopped=True)  # `kill -CONT` reaches one process after the other
    assert pauses.see(162.25, ranks_stopped=True)  # now they are


def test_a_beat_is_read_from_outside_with_the_time_of_the_phases_that_ended(tmp_path):
    path = tmp_path / "rank_0.beat"
    writer, began = heartbeat.Reporter(str(path)), time.monotonic()
    writer.report(0, "data")
    time.sleep(0.05)
    writer.report(0, "step")
    time.sleep(0.1)
    writer.report(7, "data")
    seen = heartbeat.read(str(path))
    assert (seen.step, seen.phase) == (7, "data")
    assert began < seen.at_s <= time.monotonic()
    assert 0.05 <= seen.busy_s < 0.1 <= seen.waiting_s
    assert path.stat().st_mode & 0o077 == 0
    assert heartbeat.read(str(path / "of another user")) == Progress()


def test_no_file_and_a_short_file_are_an_empty_pulse(tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"123")
    assert heartbeat.read(str(tmp_path / "none")) == heartbeat.read(str(short)) == heartbeat.Progress()


def test_a_rank_goes_on_where_its_file_has_no_room_and_says_so(capsys):
    reporter = heartbeat.Reporter("/dev/full")
    assert "No space left" in capsys.readouterr().err
    reporter.report(7, "step")
    assert reporter.last.step == 7


def test_who_waits_for_the_others_says_so_while_it_does(monkeypatch):
    off = heartbeat.Reporter()
    monkeypatch.setattr(heartbeat, "_reporter", off)
    with heartbeat.together():  # before the first step: a start has its own limit
        assert off.last.phase == ""
    off.report(3, "eval")
    with suppress(ValueError), heartbeat.together():
        assert (off.last.step, off.last.phase) == (3, "collective")
        raise ValueError
    assert (off.last.step, off.last.phase) == (3, "eval")
    with heartbeat.together(4):  # in a program that only counts steps with these calls
        assert off.last.step == 4
    assert (off.last.step, off.last.phase) == (4, "eval")
