"""A save by share and a restore take one leaf's memory beside the state, and no copy of the state."""

import json

import pytest

from tests.support import forked
from tests.support.programs import environment


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (1, 2)])
def test_a_save_and_a_restore_hold_one_leaf_beside_the_state(processes, devices, tmp_path):
    place = environment(JAX_PLATFORMS="cpu", NPROC=str(devices), JAX_NUM_CPU_DEVICES=str(devices))
    job = [
        "-m",
        "cyxjax.launch",
        "--nproc-per-node",
        str(processes),
        "-m",
        "tests.multiprocess.save_memory_job",
    ]
    done = forked.run([*job, str(tmp_path)], place, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index('{"save"') :].splitlines()[0])
    # in shares of a leaf, of which the state has twelve; measured 0.98 and 1.1: blocks of the file take 1 MB
    assert found["save"] < 1.5
    assert found["restore"] < 1.5
    # what these numbers are when a copy is held
    assert found["save in the background"] > 10
    assert found["restore all at once"] > 10
