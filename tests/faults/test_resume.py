"""Killed at any moment, any number of times, and started again by the same command: the same bits at the end.

Dropout, Adam and a cosine schedule take part, so keys, optimizer state and step counts must come back too.
"""

import random
import signal

import numpy as np
import pytest
from training import EPOCHS, STEPS_PER_EPOCH, Jobs, curves, leaves, newest_step, sha256_of, write_experiment

from cyxjax.train import audit_cli

pytestmark = pytest.mark.multiprocess
LAST = EPOCHS * STEPS_PER_EPOCH
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def unbroken(jobs, tmp_path_factory):
    """A run that nothing happened to."""
    config = write_experiment(tmp_path_factory.mktemp("unbroken"))
    ended = jobs.run(config)
    assert ended.codes == [0], ended.text
    assert newest_step(config) == LAST
    return config


def same_run(config, other):
    assert audit_cli.main([str(config.parent / "run")]) == 0
    assert newest_step(config) == newest_step(other)
    assert curves(config) == curves(other)
    assert sha256_of(leaves(config)) == sha256_of(leaves(other))


def test_killed_in_the_first_step_in_a_save_and_in_an_evaluation(jobs, unbroken, tmp_path):
    config = write_experiment(tmp_path)
    # Saves are at steps 4, 8, ...; epochs (and their evaluations) end at steps 6 and 12.
    for fault in ("compile:0", "write:4", "eval:6", "write:12"):
        ended = jobs.run(config, fault=f"KILL:0:{fault}")
        assert ended.codes == [KILLED], f"{fault}: {ended.text}"
    ended = jobs.run(config)
    assert ended.codes == [0], ended.text
    assert "Resuming from step" in ended.text
    same_run(config, unbroken)


def test_killed_at_random_moments(jobs, unbroken, tmp_path):
    config, draw = write_experiment(tmp_path), random.Random()
    for _ in range(2):
        phase = draw.choice(["data", "step", "checkpoint", "eval", "write"])
        step = max(newest_step(config), 0) + draw.randint(1, 5)
        ended = jobs.run(config, fault=f"KILL:0:{phase}:{step}")
        assert ended.codes[0] in (KILLED, 0), f"{phase}:{step}: {ended.text}"
        if ended.codes == [0]:  # the moment never came: the run was nearly over
            break
    assert jobs.run(config).codes == [0]
    same_run(config, unbroken)


def test_one_of_two_ranks_is_killed(jobs, tmp_path):
    whole, config = write_experiment(tmp_path / "whole"), write_experiment(tmp_path / "broken")
    assert jobs.run(whole, world=2).codes == [0, 0]
    for fault in ("KILL:1:step:5", "KILL:0:write:8"):
        ended = jobs.run(config, world=2, fault=fault)
        killed = int(fault[5])
        assert ended.codes[killed] == KILLED, ended.text
        assert ended.codes[1 - killed] != 0, ended.text
    ended = jobs.run(config, world=2)
    assert ended.codes == [0, 0], ended.text
    same_run(config, whole)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_in_another_number_of_processes(jobs, unbroken, tmp_path, before, after):
    config = write_experiment(tmp_path)
    assert KILLED in jobs.run(config, world=before, fault="KILL:0:step:9").codes
    ended = jobs.run(config, world=after)
    assert ended.codes == [0] * after, ended.text
    assert newest_step(config) == LAST
    # The same samples in the same order, added up in another order: float32 rounds differently.
    found, wanted = leaves(config), leaves(unbroken)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-5, err_msg=name)
