"""Asking a running job from another terminal where its ranks are."""

import json
import os
import signal
from pathlib import Path

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from tests.support.launching import RANK, start, under_way
from tests.support.programs import fresh

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


def test_a_running_job_shows_stacks_and_progress_saves_when_asked_and_goes_on(tmp_path: Path):
    job = under_way(tmp_path, ON_TERM="save")
    try:
        dump = fresh("-m", "cyxjax.launch", "--dump", job.run_id)
        assert dump.returncode == 0, dump.stderr
        assert "--- rank 0 (pid " in dump.stdout
        assert "--- rank 1 (pid " in dump.stdout
        assert dump.stdout.count("Current thread") == 2
        assert "in train" in dump.stdout
        ranks = json.loads(fresh("-m", "cyxjax.cli", "top", job.run_id, "--json").stdout)["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(rank["step"] >= 0 and rank["phase"] and rank["memory_bytes"] > 1e6 for rank in ranks), (
            ranks
        )
        assert {rank["pid"] for rank in ranks} <= set(job.survivors())
        # not a rank: it must not get a signal, which would end it
        other = fresh("-m", "cyxjax.launch", "--dump", os.getpid())
        assert other.returncode == EXIT_INFRASTRUCTURE
        assert f"{job.run_id} (launcher {job.process.pid}, ranks 0, 1)" in other.stderr
        job.process.send_signal(signal.SIGUSR1)
        assert all(job.reached("asked to save", rank) for rank in range(2))
    finally:
        job.process.send_signal(signal.SIGTERM)
        job.wait()
    assert job.code == EXIT_PREEMPTED


def test_a_hang_report_names_the_users_line_in_the_thread_that_is_waited_for(tmp_path: Path):
    (tmp_path / "slow.py").write_text(LOADER)
    program = tmp_path / "train.py"
    program.write_text(
        "import slow\nfrom tests.support import rank\nrank.FAULTS['sleep'] = slow.load_ahead\nrank.main()\n"
    )
    path = os.pathsep.join([str(RANK.parents[2]), str(tmp_path)])
    env = {"PYTHONPATH": path, "KIND": "light", "FAULT": "sleep:1:3", "STEPS": 4000}
    run = start(tmp_path, 2, "--hang-timeout", "2,compile=30", script=program, fork=True, **env)
    run.wait()
    line = next(line for line in run.err.splitlines() if line.startswith("  rank 1: step 3, data"))
    assert "while a thread is at slow.py:6 __getitem__" in line
    assert run.first["source"] == "slow.py:6 __getitem__"
