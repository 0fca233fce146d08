"""Jobs whose hosts come and go: each launcher stands for a host, all on loopback, as real processes."""

import signal
import time

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from tests.support.elastic_hosts import Hosts, finished, under_way
from tests.support.launching import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
SPARE = "this host waits until another one leaves"


@pytest.fixture
def hosts(request, tmp_path):
    """A job of one to three hosts, or as the test says."""
    made = Hosts(tmp_path, getattr(request, "param", "1:3"))
    yield made
    made.close()


def test_a_host_that_comes_costs_one_restart_at_the_new_size(hosts):
    first = hosts.add()
    hosts.wait_for_start(0)
    second = hosts.add(nproc=2)
    hosts.wait_for_start(1)
    hosts.end()
    assert "has joined" in first.err
    assert "start 1: 2 host(s), 3 rank(s)" in first.err
    assert "start 2" not in first.err
    assert "saved" in first.out  # it was asked to save before it ended
    assert (finished(first, 1, 3), finished(second, 1, 3)) == (1, 2)


def test_a_host_that_is_lost_is_dropped_and_the_others_go_on(hosts):
    first, second, third = (hosts.add() for _ in range(3))
    hosts.wait_for_start(0)
    second.process.kill()
    hosts.wait_for_start(1, first, third)
    hosts.end(first, third)
    assert (finished(first, 1, 2), finished(third, 1, 2)) == (1, 1)
    assert "is gone" in first.err
    assert "start 1: 2 host(s), 2 rank(s)" in first.err
    assert "start 2" not in first.err


def test_a_host_that_is_told_to_stop_leaves_and_the_others_go_on(hosts):
    first, second = hosts.add(), hosts.add()
    hosts.wait_for_start(0)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait().code == EXIT_PREEMPTED
    hosts.wait_for_start(1, first)
    hosts.end(first)
    assert finished(first, 1, 1) == 1


@pytest.mark.parametrize("hosts", ["2:3"], indirect=True)
def test_below_the_fewest_the_job_waits_and_then_ends_with_a_message(hosts):
    first, second = (hosts.add(DISTRIBUTED_TIMEOUT_MS=4000) for _ in range(2))
    hosts.wait_for_start(0)
    second.process.kill()
    began = time.monotonic()
    assert first.wait().code == EXIT_INFRASTRUCTURE, first.err
    assert time.monotonic() - began > 3  # it has waited for another host
    assert "Timeout waiting for hosts: 1 here" in first.err


def test_the_first_host_takes_the_job_with_it(hosts):
    first, second = hosts.add(), hosts.add(DISTRIBUTED_TIMEOUT_MS=3000)
    hosts.wait_for_start(0)
    first.process.send_signal(signal.SIGTERM)
    assert (first.wait().code, second.wait().code) == (EXIT_PREEMPTED, EXIT_PREEMPTED), second.err
    assert "the first host leaves" in second.err


def test_a_host_that_looks_for_the_first_one_leaves_when_it_is_told_to(hosts):
    first, second = hosts.add(), hosts.add(DISTRIBUTED_TIMEOUT_MS=60000)
    hosts.wait_for_start(0)
    first.process.kill()
    assert second.told("trying to reach it again")
    assert second.process.poll() is None  # the first host may be started again
    second.process.send_signal(signal.SIGTERM)
    assert second.wait().code == EXIT_PREEMPTED, second.err


def test_real_collectives_go_on_at_the_new_size(hosts):
    first, second = (hosts.add(KIND="jax", STEP_S=0.1) for _ in range(2))
    hosts.wait_for_start(0)
    second.process.kill()
    hosts.wait_for_start(1, first)
    hosts.end(first)
    assert finished(first, 1, 1) == 1


@pytest.mark.parametrize("hosts", ["1:2"], indirect=True)
def test_a_spare_waits_and_takes_the_place_of_a_host_that_goes(hosts):
    first, *others = (hosts.add() for _ in range(3))
    assert until(lambda: any(run.told(SPARE, 0.1) for run in others), 90)
    spare, other = sorted(others, key=lambda run: not run.told(SPARE, 0.1))
    hosts.wait_for_start(0, first, other)
    assert not under_way(spare, 0)
    other.process.kill()
    hosts.wait_for_start(1, first, spare)
    hosts.end(first, spare)
    assert (finished(first, 1, 2), finished(spare, 1, 2)) == (1, 1)
    assert "start 2" not in first.err
