"""A job on a fixed number of hosts, each a launcher on loopback: what befalls one is known to all at once."""

import signal
import time

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED, EXIT_SECONDARY, EXIT_USER_ERROR
from tests.support.elastic_hosts import Hosts, finished

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def hosts(tmp_path):
    """Whoever waits for a host that has given up, waits too long."""
    made = Hosts(tmp_path, "2", DISTRIBUTED_TIMEOUT_MS=600_000)
    yield made
    made.close()


def test_where_one_host_gives_up_the_other_ends_at_once(hosts):
    fault = {"FAULT": "raise:1:2", "FAULT_STARTS": 9}
    first, second = (hosts.add("--max-restarts", "5", **fault) for _ in range(2))
    assert (first.wait().code, second.wait().code) == (EXIT_SECONDARY, EXIT_USER_ERROR), first.err
    for run in (first, second):
        assert "the same error at step 2 again" in run.err
        assert run.err.count("restart 1 of 5") == 1
    assert second.err.rstrip().endswith("ValueError: boom, api_key=[redacted]")


def test_an_error_before_the_ranks_meet_ends_the_other_host(hosts):
    first, second = hosts.add(), hosts.add(STEPS="sixty")
    assert (second.wait().code, first.wait().code) == (EXIT_USER_ERROR, EXIT_USER_ERROR), first.err
    assert "ended with exit code 1: ValueError: invalid literal" in first.err


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_job_without_restarts(hosts, lost):
    runs = [hosts.add(), hosts.add()]
    hosts.wait_for_start(0)
    runs[lost].process.kill()
    left = runs[1 - lost].wait()
    assert left.code == EXIT_SECONDARY, left.err
    assert "is gone" in left.err


@pytest.mark.parametrize("lost", [0, 1])
def test_with_restarts_a_lost_host_is_waited_for_and_takes_its_ranks_again(hosts, lost):
    runs = [hosts.add("--max-restarts", "1") for _ in range(2)]
    hosts.wait_for_start(0)
    runs[lost].process.kill()
    left = runs[1 - lost]
    assert left.told("restart 1 of 1" if lost else "trying to reach it again")
    began = 1 if lost else 0  # a first host that is started anew counts from 0
    (left.log_dir / "start_0" / f"rank_{1 - lost}.log").unlink()
    again = hosts.add("--max-restarts", "1", node_rank=lost)
    hosts.wait_for_start(began, left, again)
    hosts.end(left, again)
    assert (finished(left, began, 2), finished(again, began, 2)) == (1, 1)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_host_that_is_asked_to_stop_ends_the_job(hosts, asked):
    runs = [hosts.add("--max-restarts", "3") for _ in range(2)]
    hosts.wait_for_start(0)
    began = time.monotonic()
    runs[asked].process.send_signal(signal.SIGTERM)
    codes = [run.wait().code for run in runs]
    assert codes[asked] == EXIT_PREEMPTED, runs[asked].err
    assert codes[1 - asked] in (EXIT_PREEMPTED, EXIT_SECONDARY)  # its rank misses its peer, or is asked too
    assert time.monotonic() - began < 30


def test_a_host_of_another_size_is_refused_and_the_job_waits_for_the_right_one(hosts):
    first, wrong = hosts.add(), hosts.add("--nnodes", "3", node_rank=2)
    assert wrong.wait().code == EXIT_INFRASTRUCTURE
    assert "WORLD_SIZE=3" in wrong.err
    second = hosts.add(node_rank=1)
    hosts.end(first, second)
    assert (finished(first, 0, 2), finished(second, 0, 2)) == (1, 1)
