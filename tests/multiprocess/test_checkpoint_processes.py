"""A state spread over two processes is saved by one of them and restored by one, two and three."""

import os
import socket
from pathlib import Path

import pytest

from tests.support import forked

JOB = Path(__file__).with_name("checkpoint_job.py")


def run_job(world, folder, action):
    """What each process printed last. The port is free when we look; a clash ends as a failed start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = [([JOB, rank, world, port, folder, action], os.environ | {"NPROC": "1"}) for rank in range(world)]
    ended = forked.run_all(jobs, 90)
    assert [job.returncode for job in ended] == [0] * world, "\n".join(job.stderr for job in ended)
    return [job.stdout.splitlines()[-1] for job in ended]  # gloo talks before


@pytest.mark.multiprocess
def test_two_processes_save_and_one_two_or_three_restore(tmp_path):
    assert run_job(2, tmp_path / "c", "save") == ["restored {'world': 2}"] * 2
    for world in (1, 3):
        assert run_job(world, tmp_path / "c", "restore") == ["restored {'world': 2}"] * world
    assert os.listdir(tmp_path / "c") == ["step_00000004"]
