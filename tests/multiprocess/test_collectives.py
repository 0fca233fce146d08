"""Collectives between real processes: the right numbers in every dtype, and errors on every rank."""

import os
import signal
import subprocess
import sys

import pytest

from cyxjax.checkpoint.folders import list_steps
from cyxjax.distributed.spawning import SpawnError, spawn
from tests.multiprocess import ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("forked_spawn")]


def test_values_arrive_and_a_rank_that_leaves_last_is_not_ended_by_the_end_of_rank_0(monkeypatch):
    # as in a rank of an outer job that was started again: spawned ranks are a job of their own
    monkeypatch.setenv("CYXJAX_RUN_ID", "outer")
    monkeypatch.setenv("RESTART_COUNT", "2")
    assert spawn(ranks.values, nprocs=3) is None  # a failed assertion in a rank raises here


def test_what_differs_or_is_missing_is_named_on_every_rank():
    assert spawn(ranks.errors, nprocs=2) is None


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_rank_ends_the_others_and_its_traceback_arrives(late):
    spawned = spawn(ranks.fail_on, args=(1,), nprocs=2, join=False)
    assert not late or until(lambda: not spawned._running, 90)
    with pytest.raises(SpawnError, match="(?s)rank 1 .*ValueError: rank 1 ") as caught:
        spawned.join()
    assert caught.value.rank == 1
    assert "in fail_on" in str(caught.value)
    assert ranks.LONG in str(caught.value)


def test_a_rank_that_dies_silently_is_named():
    spawned = spawn(ranks.end_without_a_word, nprocs=2, join=False)
    assert len(spawned.pids) == 2
    with pytest.raises(SpawnError, match="rank 0 .*code 7"):
        spawned.join(timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_program_that_is_stopped_waits_until_its_ranks_have_saved(name, tmp_path):
    words = [sys.executable, "-m", "tests.multiprocess.ranks", str(tmp_path)]
    with subprocess.Popen(words, start_new_session=True) as program:
        assert until(lambda: len(list(tmp_path.glob("rank_*"))) == 2, seconds=60)
        if name == "SIGTERM":
            program.terminate()  # as a scheduler does: only the program
        else:
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does: all its processes
        assert program.wait(60) == (143 if name == "SIGTERM" else -signal.SIGINT)
    (step,) = list_steps(tmp_path / "checkpoints")
    assert 3 <= step < 1000
