"""A stream shared by two ranks, one of which is killed: two ranks or one continue from its position."""

import shutil
import signal

import pytest

from tests.faults.test_resume import same_to_rounding
from tests.support import jobs
from tests.support.training import curves, digests, write_experiment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
KILLED = -signal.SIGKILL


def test_a_killed_rank_costs_no_sample_of_a_stream_in_two_processes_and_in_one(tmp_path):
    changes = {
        "data": {"name": "tests.support.brought:stream"},
        "model": {"name": "mlp", "options": {"hidden": [4]}},
        "schedule": {"name": "constant"},
        "report": False,
    }
    whole, config = (write_experiment(tmp_path / name, **changes) for name in ("whole", "two"))
    jobs.run(whole, world=2)
    # In the second epoch; saved at 4 and 8.
    ended = jobs.run(config, world=2, fault="KILL:1:step:10", code=None)
    assert ended.codes[1] == KILLED, ended.text
    assert ended.codes[0] != 0, ended.text
    alone = write_experiment(tmp_path / "one", **changes)
    shutil.copytree(tmp_path / "two" / "run", tmp_path / "one" / "run")

    ended = jobs.run(config, world=2)
    assert "Resuming from step" in ended.text
    assert curves(config) == curves(whole)
    assert digests(config) == digests(whole)

    ended = jobs.run(alone)  # one process with two devices
    assert "Resuming from step" in ended.text
    assert "WARNING" not in ended.text
    same_to_rounding(alone, whole)
