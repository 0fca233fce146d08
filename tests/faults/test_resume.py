"""Killed at any moment, any number of times, and restarted by the same command, a run has the same bits, also
those of one step per dispatch.

Adam, a cosine schedule and, where replicas stay the same, dropout are used: optimizer state, step counts and
keys must be restored too.
"""

import json
import signal
from functools import cache

import numpy as np
import pytest

from cyxjax.checkpoint.folders import list_steps
from cyxjax.cli import audit
from cyxjax.cli import checkpoint as cli_checkpoint
from cyxjax.errors import EXIT_PREEMPTED
from tests.support import jobs
from tests.support.training import (
    DROPPING,
    EPOCHS,
    LAST,
    assert_same_run,
    begun_by,
    checkpoints,
    curves,
    leaves,
    newest_step,
    write_experiment,
)

pytestmark = pytest.mark.multiprocess
KILLED = -signal.SIGKILL
# Without dropout, whose draws depend on the replica. 12 samples per step are split over 2, 3 and 4 replicas.
CUT = {"global_batch_size": 12, "cpu_devices": 1}
BY_WORLD = {  # settings by number of processes
    1: DROPPING,
    2: CUT | {"comm": "fsdp", "keep_last": 99},  # which share the parameters
    3: DROPPING | {"global_batch_size": 12},
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Uninterrupted runs of one step per dispatch, by number of processes."""

    @cache
    def made(world):
        config = write_experiment(
            tmp_path_factory.mktemp("unbroken"), steps_per_dispatch=1, **BY_WORLD[world]
        )
        jobs.run(config, world=world)
        return config

    return made


def same_to_rounding(config, other):
    # The same samples in the same order, but a different order of sums: float32 rounds differently.
    found = leaves(config)
    for name, array in leaves(other).items():
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def losses(config) -> list[tuple[int, float]]:
    """The recorded (step, loss) pairs; the experiment records each step."""
    lines = map(json.loads, (config.parent / "run" / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_several_steps_a_dispatch_have_the_bits_and_records_of_one(unbroken, tmp_path):
    whole, config = unbroken(1), write_experiment(tmp_path, steps_per_dispatch=4, **DROPPING)
    jobs.run(config)
    assert_same_run(config, whole)
    assert list_steps(checkpoints(config)) == list_steps(checkpoints(whole))  # no dispatch goes past a save
    assert losses(config) == losses(whole)
    assert len(losses(config)) == LAST


@pytest.mark.parametrize(
    # Faults, each with the steps of a dispatch; saves are at steps 4, 8, ...; epochs (and their evaluations)
    # end at steps 6 and 12.
    ("world", "faults"),
    [
        (1, {"KILL:0:compile:0": 8, "KILL:0:eval:6": 3, "KILL:0:write:12": 8}),
        # Slow: ranks are killed in saves below, in a step in test_exact.py.
        pytest.param(
            3,
            {"KILL:2:step:5": 4, "KILL:1:eval:8": 3, "KILL:0:write:16": 8},
            marks=[pytest.mark.slow, pytest.mark.wide],
        ),
    ],
    ids=["alone", "three ranks"],
)
def test_one_rank_after_another_is_killed_in_a_step_a_save_and_an_evaluation(
    unbroken, tmp_path, world, faults
):
    config = write_experiment(tmp_path, **BY_WORLD[world])
    for fault, several in faults.items():
        ended = jobs.run(config, "--steps-per-dispatch", several, world=world, fault=fault, code=None)
        killed = [rank for rank, code in enumerate(ended.codes) if code == KILLED]
        assert killed == [int(fault.split(":")[1])], f"{fault}: {ended.text}"
        assert 0 not in ended.codes
    ended = jobs.run(config, world=world)
    assert "Resuming from step" in ended.text
    assert_same_run(config, unbroken(world))
    assert set(losses(config)) <= set(losses(unbroken(world)))


def test_resumed_on_another_number_of_devices_again_and_again(unbroken, tmp_path):
    # 12 samples per step on 2 replicas (2 processes), 3 (devices of 1 process), and 2 again (likewise).
    config = write_experiment(tmp_path, **CUT)
    begun_by(config, unbroken(2), 4)
    jobs.run(config, "--cpu-devices", 3, fault="KILL:0:step:13", code=KILLED)
    jobs.run(config, "--cpu-devices", 2)
    assert newest_step(config) == newest_step(unbroken(2))
    assert audit.main([str(tmp_path / "run")]) == 0  # the same samples in the same order
    same_to_rounding(config, unbroken(2))


def test_the_same_replicas_in_other_processes_give_the_same_numbers(unbroken, tmp_path):
    config = write_experiment(tmp_path, **DROPPING)
    begun_by(config, unbroken(1), 12)
    ended = jobs.run(config, world=2)
    assert "Resuming from step 12" in ended.text
    assert ended.text.count(f"Epoch {EPOCHS}/{EPOCHS}, Loss") == 1  # of one rank
    same_to_rounding(config, unbroken(1))


def test_killed_between_the_shares_of_a_save_or_told_to_stop_nothing_is_lost(unbroken, tmp_path):
    config = write_experiment(tmp_path, comm="fsdp", **CUT)
    written = sorted(path.name for path in checkpoints(unbroken(2)).rglob("process_*"))
    assert written[-1] == "process_00001.safetensors"
    for killed, fault, last in [(1, "share:4", -1), (0, "publish:8", 4)]:
        ended = jobs.run(config, world=2, fault=f"KILL:{killed}:{fault}", code=None)
        assert ended.codes[killed] == KILLED, f"{fault}: {ended.text}"
        assert ended.codes[1 - killed] != 0, f"{fault}: {ended.text}"
        assert newest_step(config) == last
    assert cli_checkpoint.main(["verify", str(config.parent / "run")]) == 0
    # One rank is told.
    jobs.run(config, "--steps-per-dispatch", 3, world=2, fault="TERM:0:step:6", code=EXIT_PREEMPTED)
    assert "Resuming from step" in jobs.run(config, world=2).text
    assert_same_run(config, unbroken(2))
    assert set(losses(config)) <= set(losses(unbroken(2)))


@pytest.mark.slow
def test_parameters_in_shares_go_on_in_other_numbers_of_processes_and_strategies(tmp_path):
    changes = CUT | {"schedule": {"name": "constant"}}  # a cosine would end at max_steps
    whole, config = (write_experiment(tmp_path / name, **changes) for name in ("whole", "broken"))
    jobs.run(whole)
    rows = [(3, "fsdp", 4), (2, "fsdp", 8), (2, "zero1", 12), (1, "mean", 16)]
    for world, comm, until in rows:
        jobs.run(config, "--comm", comm, "--max-steps", until, world=world)
        assert newest_step(config) == until
    jobs.run(config, "--comm", "fsdp", world=2)
    assert audit.main([str(config.parent / "run")]) == 0
    same_to_rounding(config, whole)
    for name, values in curves(whole).items():
        np.testing.assert_allclose(curves(config)[name], values, rtol=1e-4, err_msg=name)
