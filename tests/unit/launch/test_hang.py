"""Who is to blame, from beats alone: the stuck are named, the honest are left alone."""

import pytest

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, ConfigError
from cyxjax.launch.backend import jax_private
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group.group_start import Budget
from cyxjax.launch.heartbeat import Limits, Progress
from cyxjax.launch.supervise import hang
from cyxjax.launch.supervise.dump import is_inside_jax, main_thread, where
from cyxjax.launch.supervise.hang import Pauses, Stopwatch, judge, stragglers

LIMITS = Limits.parse("10,compile=100,checkpoint=60")
NONE: frozenset[int] = frozenset()


def blamed(pulses, now_s=100.0, limits=LIMITS, step_s=None, stopped=NONE):
    verdict = judge(dict(enumerate(pulses)), now_s, limits, step_s, stopped)
    return None if verdict is None else verdict.rank


def test_the_rank_that_loads_while_the_others_wait():
    assert blamed([Progress(5, "step", 80), Progress(5, "data", 79), Progress(5, "step", 80)]) == 1


def test_within_the_limit_nobody_is_blamed():
    assert blamed([Progress(5, "step", 95), Progress(5, "data", 94)]) is None


def test_a_long_save_excuses_all_who_wait_for_it():
    assert blamed([Progress(5, "checkpoint", 60), Progress(5, "step", 60)]) is None
    assert blamed([Progress(5, "checkpoint", 30), Progress(5, "step", 60)]) == 0  # beyond its own limit


def test_the_first_step_compiles():
    assert blamed([Progress(0, "step", 30), Progress(0, "step", 30)]) is None
    assert blamed([Progress(0, "compile", 30), Progress(0, "compile", 30)], now_s=300) == 0


def test_where_all_wait_the_lowest_step_holds_up_the_rest():
    assert blamed([Progress(6, "step", 80), Progress(5, "step", 79.5)]) == 1


def test_a_suspended_rank_is_blamed_whatever_its_phase():
    assert blamed([Progress(5, "step", 80), Progress(5, "step", 80.5)], stopped=frozenset({1})) == 1


def test_a_rank_that_ended_early():
    pulses = {0: Progress(5, "step", 50), 1: Progress(3, "done", 49)}
    verdict = judge(pulses, 60.0, Limits(0), None, NONE)
    assert verdict is not None
    assert verdict.early_end
    assert "rank 1 finished at step 3, but rank 0 cannot go on without it in step 5" in verdict.reason
    assert judge({**pulses, 0: Progress(5, "checkpoint", 50)}, 60.0, Limits(0), None, NONE) is None


def test_programs_that_never_beat_are_left_alone():
    assert blamed([Progress(-1, "idle", 1), Progress()], now_s=1e6) is None


def test_the_limit_follows_the_median_step():
    auto, watch = Limits.parse("auto"), Stopwatch()
    pulses = [Progress(30, "step", 100), Progress(30, "data", 100)]
    assert blamed(pulses, now_s=1e5, limits=auto, step_s=None) is None  # too few steps known
    for step in range(25):
        watch.see(Progress(step, "step", float(step * 4)))
    assert watch.median_s == 4.0
    assert blamed(pulses, now_s=170, limits=auto, step_s=4.0) is None  # limit 20 x 4 = 80 s
    assert blamed(pulses, now_s=181, limits=auto, step_s=4.0) == 1


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


DUMP = """Thread 0x01 (most recent call first):
  File "/venv/site-packages/x/y.py", line 3 in run

Current thread 0x02 (most recent call first):
  File "/venv/site-packages/jax/_src/array.py", line 9 in block
  File "/home/u/train.py", line 88 in slow_loader
  File "/home/u/train.py", line 99 in <module>
"""


def test_a_dump_is_read_down_to_the_users_line():
    frames = main_thread(
        'Current thread 0x1 (most recent call first):\n  File "/old.py", line 1 in x\n\n' + DUMP
    )
    assert where(frames) == "train.py:88 slow_loader"
    assert is_inside_jax(frames)
    assert main_thread("") == []
    assert where([]) == ""


def failure(kind="SIGKILL", code=EXIT_INFRASTRUCTURE, step=3):
    return ErrorRecord(1, kind, "m", exit_code=code, step=step)


def test_the_budget_counts_restarts():
    budget = Budget(2)
    assert [budget.decide(failure(), step).again for step in (3, 9, 15)] == [True, True, False]


def test_the_same_error_at_the_same_step_is_not_tried_again():
    budget, bug = Budget(10), failure("ValueError", EXIT_USER_ERROR)
    assert budget.decide(bug, 3).again
    second = budget.decide(bug, 3)
    assert (second.again, second.exit_code) == (False, EXIT_USER_ERROR)
    assert "the same error at step 3" in second.line


def test_restarts_without_progress_wait_longer_and_then_stop():
    budget = Budget(100)
    decisions = [budget.decide(failure(), 3) for _ in range(4)]
    assert [d.again for d in decisions] == [True, True, True, False]
    assert decisions[0].delay_s == 0
    assert 0.7 < decisions[1].delay_s < decisions[2].delay_s < 2.5
    assert "came no further than step 3" in decisions[3].line


def test_progress_renews_the_patience():
    budget = Budget(100)
    assert all(budget.decide(failure(), step).again for step in range(20))


def test_a_job_that_was_asked_to_end_is_not_started_again():
    decision = Budget(5).decide(failure(), 3, asked_to_end=True)
    assert (decision.again, decision.exit_code) == (False, EXIT_INFRASTRUCTURE)


def test_a_configuration_error_is_final():
    decision = Budget(5).decide(failure("ConfigError", EXIT_CONFIG), -1)
    assert (decision.again, decision.exit_code) == (False, EXIT_CONFIG)


def test_a_supervisor_that_was_suspended_excuses_everybody():
    pauses, late = Pauses(), Progress(30, "step", 100.0)
    pauses.see(100.0, ranks_stopped=False)
    pauses.see(145.0, ranks_stopped=False)  # it looks four times a second
    assert pauses.excuse(late).at_s == 145.0
    assert pauses.excuse(Progress(30, "step", 120.0)).at_s == 145.0
    assert pauses.excuse(Progress(31, "step", 146.0)).at_s == 146.0
    assert pauses.excuse(Progress()) == Progress()  # has not begun to beat


def test_a_suspended_rank_is_excused_for_five_minutes_and_told_of_once():
    pauses, begins = Pauses(), []
    for tick in range(1000):
        begins.append(pauses.see(tick * 1.0, ranks_stopped=tick >= 10))
    assert begins.index(True) == 10
    assert sum(begins) == 1
    assert pauses.excuse(Progress(5, "step", 10.0)).at_s == pytest.approx(10.0 + hang.SUSPENDED_S, abs=2)


def test_time_between_two_suspensions_counts():
    pauses = Pauses()
    for tick in range(100):
        pauses.see(tick * 1.0, ranks_stopped=10 <= tick < 30 or 60 <= tick < 80)
    assert pauses.excuse(Progress(5, "step", 10.0)).at_s == pytest.approx(10.0 + 40.0, abs=4)


def test_ranks_that_still_stand_when_their_supervisor_wakes_were_suspended_with_it():
    pauses = Pauses()
    pauses.see(100.0, ranks_stopped=False)
    assert not pauses.see(162.0, ranks_stopped=True)  # `kill -CONT` reaches one process after the other
    assert pauses.see(162.25, ranks_stopped=True)  # now they are


def test_what_a_rank_tells_right_after_a_pause_is_no_time_per_step():
    pauses = Pauses()
    assert not pauses.touches(Progress(30, "data", 99.0))
    pauses.see(100.0, ranks_stopped=False)
    pauses.see(162.0, ranks_stopped=False)
    assert pauses.touches(Progress(30, "data", 99.0))  # its next beat counts 62 s of work in one step
    assert not pauses.touches(Progress(31, "step", 162.1))
