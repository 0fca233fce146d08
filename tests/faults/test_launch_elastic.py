"""Jobs of several hosts, each a launcher on loopback: all hosts learn immediately what happens to one."""

import signal
from contextlib import closing

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED, EXIT_SECONDARY, EXIT_USER_ERROR
from tests.support.elastic_hosts import Hosts, finished

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def elastic(tmp_path):
    """A job of one to three hosts."""
    with closing(Hosts(tmp_path, "1:3", fork=True)) as made:
        yield made


@pytest.fixture
def fixed(tmp_path):
    """A job of two hosts; waiting for a host that has given up would take too long."""
    with closing(Hosts(tmp_path, "2", fork=True, DISTRIBUTED_TIMEOUT_MS=600_000)) as made:
        yield made


def test_hosts_come_and_go_at_the_cost_of_one_restart_each(elastic):
    first = elastic.add(KIND="jax")
    elastic.wait_for_start(0)
    second = elastic.add(KIND="jax", nproc=2)
    elastic.wait_for_start(1)
    third = elastic.add(KIND="jax")
    elastic.wait_for_start(2)
    second.process.kill()
    elastic.wait_for_start(3, first, third)
    third.process.send_signal(signal.SIGTERM)
    assert third.wait().code == EXIT_PREEMPTED, third.err
    elastic.wait_for_start(4, first)
    elastic.end(first)
    assert finished(first, 4, 1) == 1
    assert "saved" in first.out  # it got the request to save before it ended
    assert "has joined" in first.err
    assert "is gone" in first.err
    for start, size in enumerate(((1, 1), (2, 3), (3, 4), (2, 2), (1, 1))):
        assert "start {}: {} host(s), {} rank(s)".format(start, *size) in first.err
    assert "start 5" not in first.err


def test_the_first_host_takes_the_job_with_it(elastic):
    first, second = elastic.add(), elastic.add(DISTRIBUTED_TIMEOUT_MS=3000)
    elastic.wait_for_start(0)
    first.process.send_signal(signal.SIGTERM)
    assert (first.wait().code, second.wait().code) == (EXIT_PREEMPTED, EXIT_PREEMPTED), second.err
    assert "the first host leaves" in second.err


def test_a_save_that_fails_when_a_host_joins_is_an_error_of_the_job(elastic):
    first = elastic.add(ON_TERM="fail to save")
    elastic.wait_for_start(0)
    second = elastic.add()
    assert (first.wait().code, second.wait().code) == (EXIT_USER_ERROR, EXIT_USER_ERROR), first.err
    assert first.first["type"] == "CheckpointError"


def test_a_host_that_looks_for_the_first_one_leaves_when_it_is_told_to(elastic):
    first, second = elastic.add(), elastic.add(DISTRIBUTED_TIMEOUT_MS=60000)
    elastic.wait_for_start(0)
    first.process.kill()
    assert second.logged("trying to reach it again")
    assert second.process.poll() is None  # the first host may be started again
    second.process.send_signal(signal.SIGTERM)
    assert second.wait().code == EXIT_PREEMPTED, second.err


def test_where_one_host_gives_up_the_other_ends_at_once(fixed):
    fault = {"FAULT": "raise:1:2", "FAULT_STARTS": 9}
    first, second = (fixed.add("--max-restarts", "5", **fault) for _ in range(2))
    assert (first.wait().code, second.wait().code) == (EXIT_SECONDARY, EXIT_USER_ERROR), first.err
    for run in (first, second):
        assert "the same error at step 2 again" in run.err
        assert run.err.count("restart 1 of 5") == 1
    assert second.err.rstrip().endswith("ValueError: boom, api_key=[redacted]")


def test_a_host_of_another_size_is_refused_and_an_error_before_the_ranks_meet_ends_all(fixed):
    first, wrong = fixed.add(), fixed.add("--nnodes", "3", node_rank=2)
    assert wrong.wait().code == EXIT_INFRASTRUCTURE
    assert "WORLD_SIZE=3" in wrong.err
    second = fixed.add(node_rank=1, STEPS="sixty")  # the job has waited for the correct one
    assert (second.wait().code, first.wait().code) == (EXIT_USER_ERROR, EXIT_USER_ERROR), first.err
    assert "ended with exit code 1: ValueError: invalid literal" in first.err


def test_the_loss_of_the_first_host_ends_a_job_without_restarts(fixed):
    first, second = fixed.add(), fixed.add()
    fixed.wait_for_start(0)
    first.process.kill()
    assert second.wait().code == EXIT_SECONDARY, second.err
    assert "the first host is gone" in second.err


@pytest.mark.parametrize("lost", [0, 1])
def test_with_restarts_a_lost_host_is_waited_for_and_takes_its_ranks_again(fixed, lost):
    runs = [fixed.add("--max-restarts", "1") for _ in range(2)]
    fixed.wait_for_start(0)
    runs[lost].process.kill()
    left = runs[1 - lost]
    assert left.logged("restart 1 of 1" if lost else "trying to reach it again")
    began = 1 if lost else 0  # a restarted first host counts from 0
    (left.log_dir / "start_0" / f"rank_{1 - lost}.log").unlink()
    again = fixed.add("--max-restarts", "1", node_rank=lost)
    fixed.wait_for_start(began, left, again)
    fixed.end(left, again)
    assert (finished(left, began, 2), finished(again, began, 2)) == (1, 1)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_is_asked_to_stop_ends_the_job(fixed, stopped):
    runs = [fixed.add("--max-restarts", "3") for _ in range(2)]
    fixed.wait_for_start(0)
    runs[stopped].process.send_signal(signal.SIGTERM)
    codes = [run.wait(30).code for run in runs]
    assert codes[stopped] == EXIT_PREEMPTED, runs[stopped].err
    assert codes[1 - stopped] in (EXIT_PREEMPTED, EXIT_SECONDARY)  # its rank misses its peer or stops too
