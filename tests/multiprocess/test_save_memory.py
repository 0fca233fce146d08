"""A save by share and a restore need the memory of one leaf beside the state, not a copy of the state."""

import json

import pytest

from tests.support.programs import printed_by


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (1, 2)])
def test_a_save_and_a_restore_hold_one_leaf_beside_the_state(processes, devices, tmp_path):
    launcher = ["-m", "cyxjax.launch", "--nproc-per-node", processes]
    place = {"NPROC": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}
    output = printed_by(*launcher, "-m", "tests.multiprocess.save_memory_job", tmp_path, **place)
    found = json.loads(output[output.index('{"save"') :].splitlines()[0])
    # in shares of a leaf (the state has twelve leaves); measured 0.98 and 1.1: blocks of the file take 1 MB
    assert found["save"] < 1.5
    assert found["restore"] < 1.5
    # these hold a copy, as a control
    assert found["save in the background"] > 10
    assert found["restore all at once"] > 10
