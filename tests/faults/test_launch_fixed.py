"""A job on a fixed number of hosts, each a launcher on loopback: what befalls one is known to all at once."""

import signal
import time

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED, EXIT_SECONDARY, EXIT_USER_ERROR
from tests.support.elastic_hosts import Hosts, finished, under_way
from tests.support.launching import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
PATIENT = {"DISTRIBUTED_TIMEOUT_MS": 600_000}  # whoever waits for a host that has given up, waits too long


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path, "2")
    yield made
    made.close()


def test_where_one_host_gives_up_the_other_ends_at_once(hosts):
    fault = {"FAULT": "raise:1:2", "FAULT_STARTS": 9}
    first, second = (hosts.add("--max-restarts", "5", **fault, **PATIENT) for _ in range(2))
    for run in (first, second):
        run.wait()
    assert (first.code, second.code) == (EXIT_SECONDARY, EXIT_USER_ERROR), first.err
    for run in (first, second):
        assert "the same error at step 2 again" in run.err
        assert run.err.count("restart 1 of 5") == 1
    assert second.err.rstrip().endswith("ValueError: boom, api_key=[redacted]")


def test_an_error_before_the_ranks_meet_ends_the_other_host(hosts):
    first, second = hosts.add(**PATIENT), hosts.add(STEPS="sixty", **PATIENT)
    for run in (second, first):
        run.wait()
        assert run.code == EXIT_USER_ERROR, run.err
    assert "ended with exit code 1: ValueError: invalid literal" in first.err


def test_a_lost_host_ends_the_job_without_restarts(hosts):
    first, second = hosts.add(**PATIENT), hosts.add(**PATIENT)
    assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
    second.process.kill()
    first.wait()
    assert first.code == EXIT_SECONDARY, first.err
    assert "is gone" in first.err


def test_a_lost_first_host_ends_the_job_without_restarts(hosts):
    first, second = hosts.add(**PATIENT), hosts.add(**PATIENT)
    assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
    first.process.kill()
    second.wait()
    assert second.code == EXIT_SECONDARY, second.err


@pytest.mark.parametrize("lost", [0, 1])
def test_with_restarts_a_lost_host_is_waited_for_and_takes_its_ranks_again(hosts, lost):
    restarts = ("--max-restarts", "1")
    runs = [hosts.add(*restarts, **PATIENT) for _ in range(2)]
    assert until(lambda: all(under_way(run, 0) for run in runs), 90)
    runs[lost].process.kill()
    left = runs[1 - lost]
    assert left.told("restart 1 of 1" if lost else "trying to reach it again")
    began = 1 if lost else 0  # a first host that is started anew counts from 0
    (left.log_dir / "start_0" / f"rank_{1 - lost}.log").unlink()
    again = hosts.add(*restarts, node_rank=lost, **PATIENT)
    assert until(lambda: under_way(left, began) and under_way(again, began), 90)
    hosts.enough.touch()
    for run in (left, again):
        run.wait()
        assert run.code == 0, run.err
        assert finished(run, began, 2) == 1


@pytest.mark.parametrize("asked", [0, 1])
def test_a_host_that_is_asked_to_stop_ends_the_job(hosts, asked):
    runs = [hosts.add("--max-restarts", "3", **PATIENT) for _ in range(2)]
    assert until(lambda: all(under_way(run, 0) for run in runs), 90)
    began = time.monotonic()
    runs[asked].process.send_signal(signal.SIGTERM)
    for run in runs:
        run.wait()
    assert runs[asked].code == EXIT_PREEMPTED, runs[asked].err
    assert runs[1 - asked].code in (
        EXIT_PREEMPTED,
        EXIT_SECONDARY,
    )  # its rank misses its peer, or is asked too
    assert time.monotonic() - began < 30


def test_a_host_of_another_size_is_refused_and_the_job_waits_for_the_right_one(tmp_path, hosts):
    first = hosts.add(**PATIENT)
    other = Hosts(tmp_path / "other", "3")
    other.job, other._flags[3:] = hosts.job, hosts._flags[3:]
    wrong = other.add(node_rank=2, **PATIENT)
    wrong.wait()
    assert wrong.code == EXIT_INFRASTRUCTURE
    assert "WORLD_SIZE=3" in wrong.err
    second = hosts.add(**PATIENT)
    hosts.enough.touch()
    for run in (first, second):
        run.wait()
        assert run.code == 0, run.err
        assert finished(run, 0, 2) == 1
