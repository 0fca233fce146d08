"""Asking a running job where its ranks stand, from another terminal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE
from cyxjax.launch.supervise.processes import stat
from tests.support.launching import RANK, Run, start

pytestmark = pytest.mark.multiprocess

LOADER = """\
import threading, time


class Samples:
    def __getitem__(self, index):
        time.sleep(1000)


def load_ahead():
    threading.Thread(target=lambda: Samples()[0], daemon=True).start()
    threading.Event().wait()
"""


def dump(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cyxjax.launch", "--dump", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def job(tmp_path):
    run = start(tmp_path, 2, KIND="light", STEPS=4000)
    yield run
    run.process.kill()
    run.process.communicate()
    assert run.no_survivors_within(10)


@pytest.mark.parametrize("word", ["run id", "launcher", "rank"])
def test_all_stacks_are_shown_and_the_job_goes_on(job: Run, word):
    assert job.reached("under way", 0)
    assert job.reached("under way", 1)
    ranks = [pid for pid in job.survivors() if pid != job.process.pid]
    said = dump({"run id": job.run_id, "launcher": str(job.process.pid), "rank": str(ranks[0])}[word])
    assert said.returncode == 0, said.stderr
    assert "--- rank 0 (pid " in said.stdout
    assert "--- rank 1 (pid " in said.stdout
    assert said.stdout.count("Current thread") == 2
    assert "in train" in said.stdout
    assert job.process.poll() is None


def test_top_shows_the_ranks_of_a_running_job(job: Run):
    assert job.reached("under way", 0)
    assert job.reached("under way", 1)
    command = [sys.executable, "-m", "cyxjax.cli", "top", job.run_id, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    ranks = json.loads(said.stdout)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["step"] >= 0 and rank["phase"] and rank["memory_bytes"] > 1e6 for rank in ranks), ranks
    assert {rank["pid"] for rank in ranks} <= set(job.survivors())
    assert job.process.poll() is None


def test_a_job_that_is_not_there_is_answered_with_those_that_are(job: Run):
    assert job.reached("under way", 1)
    said = dump("no-such-job")
    assert said.returncode == EXIT_INFRASTRUCTURE
    assert f"{job.run_id} (launcher {job.process.pid}, ranks 0, 1)" in said.stderr


def test_a_process_that_is_no_rank_is_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        assert dump(str(other.pid)).returncode == EXIT_INFRASTRUCTURE
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_orphan_of_a_rank_is_no_rank_and_who_adopted_it_is_left_alone(tmp_path: Path):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "print(subprocess.Popen(child, start_new_session=True, stdin=-3, stdout=-3, stderr=-3).pid)\n"
    )
    launch = [sys.executable, "-m", "cyxjax.launch", "--run-id", "orphan", str(rank)]
    # As PID 1 of a container: it adopts what its children leave, and has no handler for SIGUSR2.
    init = (
        "import ctypes, subprocess, sys, time\n"
        "ctypes.CDLL(None).prctl(36, 1)\n"
        "subprocess.run(sys.argv[1:], check=True)\n"
        "print('ended', flush=True)\ntime.sleep(1000)\n"
    )
    words, pipe = [sys.executable, "-c", init, *launch], {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipe) as adopter:
        try:
            orphan = int(adopter.stdout.readline())
            assert adopter.stdout.readline() == "ended\n"
            assert stat(orphan).parent == adopter.pid
            assert dump("orphan").returncode == EXIT_INFRASTRUCTURE
            assert adopter.poll() is None
        finally:
            os.kill(orphan, signal.SIGKILL)
            adopter.kill()


def test_without_a_job_the_usage_is_said():
    said = dump()
    assert said.returncode == EXIT_CONFIG
    assert "HINT: give its --run-id" in said.stderr


def test_a_hang_report_names_the_users_line_in_the_thread_that_is_waited_for(tmp_path: Path):
    (tmp_path / "slow.py").write_text(LOADER)
    program = tmp_path / "train.py"
    program.write_text(
        "import slow\nfrom tests.support import rank\nrank.FAULTS['sleep'] = slow.load_ahead\nrank.main()\n"
    )
    path = os.pathsep.join([str(RANK.parents[2]), str(tmp_path)])
    env = {"PYTHONPATH": path, "KIND": "light", "FAULT": "sleep:1:3", "STEPS": 4000}
    run = start(tmp_path, 2, "--hang-timeout", "2,compile=30", script=program, **env)
    run.wait()
    line = next(line for line in run.err.splitlines() if line.startswith("  rank 1: step 3, data"))
    assert "while a thread is at slow.py:6 __getitem__" in line
    assert run.first["source"] == "slow.py:6 __getitem__"
