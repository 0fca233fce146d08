"""Several steps per dispatch: the same bits as one per dispatch, whatever ends a dispatch."""

import json
import signal
from functools import cache

import pytest

from cyxjax.checkpoint.folders import list_steps
from cyxjax.errors import EXIT_PREEMPTED
from tests.support import jobs
from tests.support.training import (
    assert_same_run,
    checkpoints,
    newest_step,
    write_experiment,
)

pytestmark = pytest.mark.multiprocess
# (processes, steps per dispatch): 6 steps per epoch, a save at every fourth
ROWS = [(1, 8), (2, 4), (2, "auto")]


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory):
    """Runs with one step per dispatch, by number of processes."""

    @cache
    def made(world):
        config = write_experiment(
            tmp_path_factory.mktemp("one"), cpu_devices=2 // world, steps_per_dispatch=1
        )
        jobs.run(config, world=world)
        return config

    return made


def losses(config) -> list[tuple[int, float]]:
    """The recorded (step, loss) pairs; the experiment records each step."""
    lines = map(json.loads, (config.parent / "run" / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.parametrize(("world", "several"), ROWS)
def test_the_bits_and_records_are_those_of_one_step_a_dispatch(one_at_a_time, world, several, tmp_path):
    one = one_at_a_time(world)
    config = write_experiment(tmp_path, cpu_devices=2 // world, steps_per_dispatch=several)
    jobs.run(config, world=world)
    assert_same_run(config, one)
    assert list_steps(checkpoints(config)) == list_steps(checkpoints(one))  # no dispatch goes past a save
    assert losses(config) == losses(one)
    assert len(losses(one)) == 18


def test_a_run_that_was_stopped_and_killed_between_saves_ends_with_the_same_bits(one_at_a_time, tmp_path):
    world, one = 2, one_at_a_time(2)
    config = write_experiment(tmp_path, cpu_devices=2 // world, steps_per_dispatch=3)
    jobs.run(config, world=world, fault="TERM:0:step:6", code=EXIT_PREEMPTED)
    assert newest_step(config) < 18
    killed = jobs.run(config, "--steps-per-dispatch", 4, world=world, fault="KILL:0:step:12", code=None)
    assert -signal.SIGKILL in killed.codes, killed.text
    jobs.run(config, "--steps-per-dispatch", "auto", world=world)
    assert_same_run(config, one)
