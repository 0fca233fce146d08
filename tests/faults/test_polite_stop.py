"""SIGTERM, Ctrl-C and --max-time: all ranks stop after the same step, save, and log how to continue."""

import os
import signal
import time
from contextlib import suppress

import pytest

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import find_problems
from cyxjax.cli import audit
from cyxjax.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED
from tests.support import jobs
from tests.support.forked import FRESH, Program
from tests.support.launching import start
from tests.support.programs import environment
from tests.support.training import LAST, checkpoints, newest_step, write_experiment
from tests.support.waiting import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
IN_FLIGHT = 2  # steps already dispatched when a rank asks to stop


def stopped_after(config, ended):
    """The last saved step; checks that it is intact and that the log says how to continue."""
    step = newest_step(config)
    assert f"Stopped and saved after step {step}. Run the same command again" in ended.text, ended.text
    assert find_problems(step_folder(checkpoints(config), step), step) == []
    return step


def test_one_rank_is_told_and_all_stop_after_the_same_step(tmp_path):
    config = write_experiment(tmp_path, steps_per_dispatch=1)
    ended = jobs.run(config, world=2, fault="TERM:1:step:7", code=EXIT_PREEMPTED)
    assert 7 < stopped_after(config, ended) <= 7 + 1 + IN_FLIGHT
    jobs.run(config, world=2)
    assert newest_step(config) == LAST
    assert audit.main([str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("fault", "at", "code"),
    [
        ("TERM:0:compile:0", 0, EXIT_PREEMPTED),
        ("TERM:0:eval:6", 6, EXIT_PREEMPTED),
        ("INT:0:write:8", 8, EXIT_INTERRUPT),
    ],
)
def test_told_while_compiling_evaluating_or_saving(tmp_path, fault, at, code):
    config = write_experiment(tmp_path, epochs=20, steps_per_dispatch=1)
    ended = jobs.run(config, fault=fault, code=code)
    # During a save: the signal arrives while later steps are already running.
    assert at < stopped_after(config, ended) <= at + (40 if "write" in fault else 1 + IN_FLIGHT)


def test_a_second_signal_does_not_wait_for_the_save(tmp_path):
    config = write_experiment(tmp_path)
    ended = jobs.run(config, fault="TERM:0:step:11:2", code=EXIT_PREEMPTED)
    assert "Stopped" not in ended.text
    assert newest_step(config) in (4, 8)  # the save of step 8 may have been running
    ended = jobs.run(config, fault="INT:0:step:11:2", code=EXIT_INTERRUPT)
    assert "Traceback" not in ended.text
    assert "run the same command again" in ended.text


def test_out_of_time_on_one_clock_is_out_of_time_for_all(tmp_path):
    config = write_experiment(tmp_path, epochs=1000)
    ended = jobs.run(config, "--max-time", "0.3", world=2)
    assert "stopped by max_time" in ended.text
    assert stopped_after(config, ended) > 0


@pytest.mark.parametrize(
    ("number", "to", "moments_s", "code"),
    [
        (signal.SIGTERM, "the launcher", (0.0,), EXIT_PREEMPTED),  # which passes it on
        (signal.SIGTERM, "all", (0.0, 0.05, 0.3, 0.6, 1.0), EXIT_PREEMPTED),  # systemd: control-group
        (signal.SIGINT, "all", (0.0, 0.05), EXIT_INTERRUPT),
        (signal.SIGINT, "a rank", (0.0,), EXIT_INTERRUPT),
    ],
    ids=["TERM to the launcher", "TERM to all", "INT to all", "INT to a rank"],
)
def test_signals_within_two_seconds_to_any_process_are_one_request(tmp_path, number, to, moments_s, code):
    config = write_experiment(tmp_path, epochs=100_000, checkpoint_every_n_steps=1_000_000)
    run = start(tmp_path / "logs", 2, "-m", "cyxjax.train", "--config", script=config, fork=True)
    assert run.reached("Val loss", rank=0), run.wait(5).err
    pids, begin = [*run.survivors(), run.process.pid], time.monotonic()
    assert len(pids) == 3
    pids = {"all": pids, "a rank": pids[:1], "the launcher": pids[-1:]}[to]
    for moment_s in moments_s:
        time.sleep(max(0.0, begin + moment_s - time.monotonic()))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        pids.reverse()
    assert (run.wait().code, run.first) == (code, {}), run.err
    assert run.log(0).count("Stopped and saved after step") == 1, run.log(0) + run.err
    assert list_steps(checkpoints(config))
    assert run.no_survivors_within(30)


PROGRAM = """
import sys, time, numpy as np, cyxjax as cx
X, Y = np.eye(64, 4, dtype=np.float32), np.arange(64, dtype=np.int32) % 4
trainer = cx.DistributedTrainer(cx.get_model("mlp")(), "cross_entropy", "adam")
try:
    trainer.fit(X, Y, epochs=int(sys.argv[2]), run_dir=sys.argv[1], log_every_n_batches=1)
finally:
    time.sleep(trainer.is_master())  # what one rank does last, no other cuts off
    print("finally at step", trainer.history.num_steps, flush=True)
print("trained", flush=True)
"""


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "two ranks"])
def test_a_program_of_ones_own_ends_with_the_code_of_a_stopped_run(ranks, tmp_path):
    program, run_dir = tmp_path / "train.py", tmp_path / "run"
    program.write_text(PROGRAM)

    def begin(epochs):
        launcher = ("-m", "cyxjax.launch", "--nproc-per-node", ranks) if ranks else ()
        fresh = () if ranks else FRESH
        return Program([*launcher, program, run_dir, epochs], environment(), fresh=fresh)

    run = begin(100_000)
    metrics = run_dir / "metrics.jsonl"
    assert until(lambda: metrics.is_file() and metrics.stat().st_size, 90)  # training has begun
    run.send_signal(signal.SIGTERM)
    printed, errors = run.communicate(timeout=90)
    assert run.returncode == EXIT_PREEMPTED, errors
    assert printed.count("finally at step") == max(ranks, 1)
    assert "trained" not in printed
    (saved,) = {  # all ranks stop after the same step
        line.split()[-1] for line in printed.splitlines() if "finally at step" in line
    }
    assert max(list_steps(run_dir / "checkpoints")) == int(saved)
    run = begin(int(saved) + 2)
    printed, errors = run.communicate(timeout=90)
    assert run.returncode == EXIT_OK, errors
    assert "trained" in printed
