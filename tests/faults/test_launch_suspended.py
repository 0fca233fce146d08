"""Pauses that are not faults of the job: suspended processes, a slow reader of its output."""

import os
import signal
import time

import psutil
import pytest

from cyxjax.errors import EXIT_PREEMPTED
from cyxjax.launch.heartbeat import read
from tests.support.elastic_hosts import finished
from tests.support.launching import under_way, until

pytestmark = pytest.mark.multiprocess


HELD_S = 36  # longer than the 30 s without progress that the watchdog allows once it knows the step time
KNOWN_AT = 120  # steps of 0.05 s: by then it has checked more than 20 times


def processes_of(run, what: str) -> list[int]:
    ranks = run.survivors()
    return {"the job": [run.process.pid, *ranks], "the launcher": [run.process.pid], "a rank": ranks[-1:]}[
        what
    ]


def step_of(run) -> int:
    """The step that the slower rank of `run` has reported to its launcher."""
    return min(read(str(path)).step for path in run.log_dir.glob("cyxjax-*/*.beat"))


@pytest.mark.slow
def test_what_was_suspended_goes_on(tmp_path):
    # jax's heartbeats used to end ranks by SIGABRT, the watchdog by a false Hang. Three jobs, held together.
    names, held = ("the job", "the launcher", "a rank"), []
    enough = tmp_path / "enough"
    runs = {what: under_way(tmp_path / what, KIND="jax", UNTIL=enough, fork=True) for what in names}
    for what, run in runs.items():
        assert until(lambda run=run: step_of(run) >= KNOWN_AT, 90)
        for pid in processes_of(run, what):
            os.kill(pid, signal.SIGSTOP)
            held.append(pid)
    time.sleep(HELD_S)
    for pid in held:
        os.kill(pid, signal.SIGCONT)
    enough.touch()
    for what, run in runs.items():
        assert (run.wait().code, run.first) == (0, {}), run.err
        assert finished(run, 0, 2) == 2
        assert ("suspended (SIGSTOP); waiting up to 300 s" in run.err) == (what == "a rank")


@pytest.mark.slow
def test_ctrl_z_suspends_the_ranks_too_and_they_go_on(tmp_path):
    run = under_way(tmp_path, UNTIL=tmp_path / "enough")
    run.process.send_signal(signal.SIGTSTP)
    job = [psutil.Process(pid) for pid in processes_of(run, "the job")]
    all_stopped = until(lambda: {one.status() for one in job} == {psutil.STATUS_STOPPED}, 90)
    run.process.send_signal(signal.SIGCONT)
    (tmp_path / "enough").touch()
    run.wait()
    assert all_stopped
    assert (run.code, run.first) == (0, {}), run.err


def test_a_reader_that_stands_still_stops_neither_the_ranks_nor_sigterm(tmp_path):
    # 8 MB, more than the launcher keeps, into a pipe that nobody reads, then endless steps
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    wrap = ("sh", "-c", f'exec "$@" > {tmp_path / "pipe"}', "sh")
    run = under_way(tmp_path, 2, "--grace", "20", FAULT="noise:1:1", NOISE_MB=5, ON_TERM="save", wrap=wrap)
    run.process.send_signal(signal.SIGTERM)  # after the noise
    assert (run.wait().code, run.survivors()) == (EXIT_PREEMPTED, []), run.err
    os.close(reader)
