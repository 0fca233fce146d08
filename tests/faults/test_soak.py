"""A training under the launcher that loses a rank many times: the launcher does not leak."""

import random
import signal

import psutil
import pytest

from cyxjax.cli import audit
from cyxjax.errors import EXIT_PREEMPTED
from tests.support import jobs
from tests.support.launching import start, until
from tests.support.training import digests, newest_step, write_experiment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]
KILLS, STEPS_BETWEEN = 6, 40
ENDLESS = {
    "epochs": 1_000_000,
    "cpu_devices": 1,
    "schedule": {"name": "constant"},  # a cosine would depend on the number of epochs
    "checkpoint_every_n_steps": 20,
    "sentinel_every_n_steps": 20,  # compares the ranks' parameters, and ends the run if they differ
    "log_every_n_batches": 1000,
    "evaluate_every_n_epochs": 0,
}


def went_on(config, step):
    return until(lambda: newest_step(config) >= step + STEPS_BETWEEN, 90)


def test_r39_kill_after_kill_leaves_the_supervisor_and_the_numbers_as_they_were(tmp_path):
    config = write_experiment(tmp_path / "broken", **ENDLESS)
    flags = ("--max-restarts", "99", "-m", "cyxjax.train", "--config")
    run = start(tmp_path / "logs", 2, *flags, script=config, fork=True)
    supervisor, sizes, step = psutil.Process(run.process.pid), [], 0
    for _ in range(KILLS):
        assert went_on(config, step), run.wait(1).err
        sizes.append((supervisor.num_threads(), supervisor.num_fds()))
        victim = psutil.Process(random.choice(run.survivors()))
        victim.kill()
        victim.wait(60)
        step = newest_step(config)  # the other rank saves at most once more; later saves are the next group's
    assert went_on(config, step), run.wait(1).err
    run.process.send_signal(signal.SIGTERM)
    assert run.wait().code == EXIT_PREEMPTED, run.err
    assert f"restart {KILLS} of 99" in run.err
    assert run.no_survivors_within(30)
    for earlier_or_later in zip(*sizes, strict=True):  # threads, then descriptors: before each kill
        assert min(earlier_or_later[-4:]) <= max(earlier_or_later[:2]), sizes
    assert audit.main([str(tmp_path / "broken" / "run")]) == 0
    whole = write_experiment(tmp_path / "whole", **ENDLESS, max_steps=newest_step(config))
    jobs.run(whole, world=2)
    assert newest_step(whole) == newest_step(config)
    assert digests(whole) == digests(config)
