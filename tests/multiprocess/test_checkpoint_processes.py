"""A state spread over two processes is saved by one of them and restored by one, two and three."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("checkpoint_job.py")


def run_job(world, folder, action):
    """What each process printed last. The port is free when we look; a clash ends as a failed start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"NPROC": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, JOB, str(rank), str(world), str(port), str(folder), action],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [job.communicate(timeout=90) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0] * world, "\n".join(error for _, error in outputs)
    return [out.splitlines()[-1] for out, _ in outputs]  # gloo talks before


@pytest.mark.multiprocess
def test_two_processes_save_and_one_two_or_three_restore(tmp_path):
    assert run_job(2, tmp_path / "c", "save") == ["restored {'world': 2}"] * 2
    for world in (1, 3):
        assert run_job(world, tmp_path / "c", "restore") == ["restored {'world': 2}"] * world
    assert os.listdir(tmp_path / "c") == ["step_00000004"]
