"""Jobs whose hosts come and go: each launcher stands for a host, all on loopback, as real processes."""

import signal
import socket
import time

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED, EXIT_USER_ERROR
from tests.support.elastic_hosts import Hosts, finished, under_way
from tests.support.launching import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def hosts(tmp_path):
    """A job of one to three hosts."""
    made = Hosts(tmp_path, "1:3")
    yield made
    made.close()


def test_a_host_that_comes_costs_one_restart_at_the_new_size(hosts):
    first = hosts.add()
    assert until(lambda: under_way(first, 0), 90)
    second = hosts.add(nproc=2)
    assert until(lambda: under_way(first, 1) and under_way(second, 1), 90)
    hosts.enough.touch()
    for run in (first, second):
        run.wait()
        assert run.code == 0, run.err
    assert "has joined" in first.err
    assert "start 1: 2 host(s), 3 rank(s)" in first.err
    assert "start 2" not in first.err
    assert "saved" in first.out  # it was asked to save before it ended
    assert (finished(first, 1, 3), finished(second, 1, 3)) == (1, 2)


def test_a_host_that_is_lost_is_dropped_and_the_others_go_on(hosts):
    first, second, third = (hosts.add() for _ in range(3))
    assert until(lambda: all(under_way(run, 0) for run in hosts.runs), 90)
    second.process.kill()
    assert until(lambda: under_way(first, 1) and under_way(third, 1), 90)
    hosts.enough.touch()
    for run in (first, third):
        run.wait()
        assert run.code == 0, run.err
        assert finished(run, 1, 2) == 1
    assert "is gone" in first.err
    assert "start 1: 2 host(s), 2 rank(s)" in first.err
    assert "start 2" not in first.err


def test_a_host_that_is_told_to_stop_leaves_and_the_others_go_on(hosts):
    first, second = hosts.add(), hosts.add()
    assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
    second.process.send_signal(signal.SIGTERM)
    second.wait()
    assert until(lambda: under_way(first, 1), 90)
    hosts.enough.touch()
    first.wait()
    assert (second.code, first.code) == (EXIT_PREEMPTED, 0), first.err
    assert finished(first, 1, 1) == 1


def test_below_the_fewest_the_job_waits_and_then_ends_with_a_message(tmp_path):
    hosts = Hosts(tmp_path, "2:3")
    try:
        first, second = (hosts.add(DISTRIBUTED_TIMEOUT_MS=4000) for _ in range(2))
        assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
        second.process.kill()
        began = time.monotonic()
        first.wait()
        assert time.monotonic() - began > 3  # it has waited for another host
        assert first.code == EXIT_INFRASTRUCTURE, first.err
        assert "Timeout waiting for hosts: 1 here" in first.err
        assert "at least 2 are needed" in first.err
    finally:
        hosts.close()


def test_the_first_host_takes_the_job_with_it(hosts):
    first, second = hosts.add(), hosts.add(DISTRIBUTED_TIMEOUT_MS=3000)
    assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
    first.process.send_signal(signal.SIGTERM)
    first.wait()
    second.wait()
    assert (first.code, second.code) == (EXIT_PREEMPTED, EXIT_PREEMPTED), second.err
    assert "the first host leaves" in second.err


def test_a_failure_is_restarted_within_the_budget_and_shown_where_it_happened(hosts):
    fault = {"FAULT": "raise:1:2", "FAULT_STARTS": 9}
    first, second = (hosts.add("--max-restarts", "5", **fault) for _ in range(2))
    for run in (first, second):
        run.wait()
        assert run.code == EXIT_USER_ERROR, run.err
    assert "the same error at step 2 again" in first.err
    assert second.err.count("Traceback") == 2
    assert "ValueError: boom, api_key=[redacted]" in second.err


def test_a_host_without_the_token_is_refused(hosts):
    first, other = hosts.add(), hosts.add(CYXJAX_TOKEN="wrong")
    other.wait()
    assert until(lambda: under_way(first, 0), 90)
    hosts.enough.touch()
    first.wait()
    assert first.code == 0, first.err
    assert finished(first, 0, 1) == 1
    assert other.code == EXIT_INFRASTRUCTURE
    assert "wrong or missing job token" in other.err


def test_a_host_that_looks_for_the_first_one_leaves_when_it_is_told_to(hosts):
    first, second = hosts.add(), hosts.add(DISTRIBUTED_TIMEOUT_MS=60000)
    assert until(lambda: under_way(second, 0), 90)
    first.process.kill()
    assert second.told("trying to reach it again")
    assert second.process.poll() is None  # the first host may be started again
    second.process.send_signal(signal.SIGTERM)
    second.wait()
    assert second.code == EXIT_PREEMPTED, second.err
    assert "trying to reach it again" in second.err


def test_real_collectives_go_on_at_the_new_size(hosts):
    first, second = (hosts.add(KIND="jax", STEP_S=0.1) for _ in range(2))
    assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
    second.process.kill()
    assert until(lambda: under_way(first, 1), 90)
    hosts.enough.touch()
    first.wait()
    assert first.code == 0, first.err
    assert finished(first, 1, 1) == 1


def test_a_spare_waits_and_takes_the_place_of_a_host_that_goes(tmp_path):
    hosts = Hosts(tmp_path, "1:2")
    try:
        first, second = hosts.add(), hosts.add()
        assert until(lambda: under_way(first, 0) and under_way(second, 0), 90)
        spare = hosts.add()
        assert spare.told("this one waits until one of them goes")
        second.process.kill()
        assert until(lambda: under_way(first, 1) and under_way(spare, 1), 90)
        hosts.enough.touch()
        for run in (first, spare):
            run.wait()
            assert run.code == 0, run.err
            assert finished(run, 1, 2) == 1
        assert "is here as a spare: 2 hosts are the most" in first.err
        assert spare.err.count("this one waits until one of them goes") == 1
        assert "start 2" not in first.err
    finally:
        hosts.close()


def test_a_spare_that_is_not_needed_ends_with_the_job(tmp_path):
    hosts = Hosts(tmp_path, "1:2")
    try:
        runs = [hosts.add() for _ in range(3)]
        waits = "this one waits until one of them goes"
        assert until(lambda: any(run.told(waits, 0.1) for run in runs), 90)
        assert until(lambda: sum(under_way(run, 0) for run in runs) == 2, 90)
        hosts.enough.touch()
        codes = [run.wait().code for run in runs]
        assert codes == [0, 0, 0], [run.err for run in runs]
        assert [finished(run, 0, 2) for run in runs].count(1) == 2
        assert sum(waits in run.err for run in runs) == 1
    finally:
        hosts.close()


def test_an_error_before_the_ranks_meet_ends_the_other_hosts_with_its_name(hosts):
    # The ranks of the first host would wait for the others for longer than the run may take.
    first = hosts.add(DISTRIBUTED_TIMEOUT_MS=600_000)
    second = hosts.add(STEPS="sixty", DISTRIBUTED_TIMEOUT_MS=600_000)
    second.wait()
    first.wait()
    assert (first.code, second.code) == (EXIT_USER_ERROR, EXIT_USER_ERROR), first.err
    named = (
        f"failed on host {socket.gethostname()}: exit: ended with exit code 1: ValueError: invalid literal"
    )
    assert named in first.err
    assert first.err.count("not started again: --max-restarts is 0") == 1
    assert "sixty" in second.err
