"""The policy of a job as a pure state machine: events and the time go in, orders come out."""

import pytest

from cyxjax.errors import (
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPT,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_SECONDARY,
    EXIT_USER_ERROR,
)
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group.controller import CloseStart, Controller, Event, OpenStart, Send, Size
from cyxjax.launch.group.group_start import Budget, Member, end_message


class Job:
    """A controller with the messages it has sent, by host; `now` is set by hand."""

    def __init__(self, size, restarts=0, timeout_s=30.0):
        self.controller, self.now = Controller(size, timeout_s, Budget(restarts), 0.0), 0.0
        self.orders = []

    def pass_time(self, seconds):
        self.now += seconds
        self.orders += self.controller.handle(self.now)

    def event(self, host, kind, message=None):
        self.orders += self.controller.handle(self.now, Event(host, kind, message or {}))

    def join(self, *hosts):
        for host in hosts:
            self.event(host, "joined")

    def end(self, host, number, how="ok", step=3, first=None):
        self.event(host, "message", end_message(number, how, step, first))

    def sent(self, host, key):
        messages = [order.message for order in self.orders if isinstance(order, Send) and order.host is host]
        return [message[key] for message in messages if key in message]

    @property
    def starts(self):
        return [order for order in self.orders if isinstance(order, OpenStart)]

    @property
    def code(self):
        return None if self.controller.end is None else self.controller.end.code


def boom(rank=1, **changes):
    return ErrorRecord(rank, "ValueError", "boom", host="b", exit_code=EXIT_USER_ERROR, **changes)


@pytest.fixture
def pair():
    """A fixed job of 3 ranks on two hosts, under way."""

    def build(restarts=0):
        job = Job(Size(world_size=3), restarts)
        a, b = Member("a", 0, 2), Member("b", 2)
        job.join(b, a)
        return job, a, b

    return build


def test_a_fixed_job_starts_when_all_its_ranks_are_here_each_host_at_its_own(pair):
    job, a, b = pair()
    assert job.starts == [OpenStart(0, 3)]
    assert (job.sent(a, "base_rank"), job.sent(b, "base_rank")) == ([0], [2])
    job.end(a, 0)
    assert job.code is None
    job.end(b, 0)
    assert job.code == EXIT_OK
    assert (job.sent(a, "over"), job.sent(b, "over")) == ([0], [0])


def test_hosts_whose_ranks_overlap_are_no_whole_job():
    job = Job(Size(world_size=3))
    job.join(Member("a", 0, 2), Member("b", 1, 2))
    assert job.starts == []
    job.pass_time(31.0)
    assert job.code == EXIT_INFRASTRUCTURE


def test_a_missing_host_is_waited_for_as_long_as_the_timeout_says():
    job, a = Job(Size(world_size=2)), Member("a", 0)
    job.join(a)
    job.pass_time(29.0)
    assert job.code is None
    job.pass_time(1.0)
    assert job.code == EXIT_INFRASTRUCTURE
    assert "rank 1 missing" in job.sent(a, "why")[0]


@pytest.mark.parametrize(("restarts", "code"), [(0, EXIT_SECONDARY), (1, None)])
def test_a_fixed_job_pays_for_a_lost_host_with_a_restart(pair, restarts, code):
    job, a, b = pair(restarts)
    job.event(b, "lost")
    assert job.sent(a, "end") == [0]
    job.end(a, 0, "preempted")
    assert job.code == code
    if restarts:
        assert job.starts == [OpenStart(0, 3)]  # it waits for the host
        again = Member("b", 2)
        job.join(again)
        assert job.sent(again, "start") == [1]


def test_an_error_anywhere_decides_for_all_hosts_at_once(pair):
    job, a, b = pair()
    job.end(b, 0, "failed", 5, boom(2))
    assert job.sent(a, "end") == []  # its ranks notice by themselves
    job.pass_time(3.0)
    assert job.sent(a, "end") == [0]  # unless they do not
    job.end(a, 0, "failed", 5, ErrorRecord(0, "PeerLost", "", True, EXIT_SECONDARY))
    assert job.code == EXIT_USER_ERROR
    for host in (a, b):
        assert "rank 2 failed on host b" in job.sent(host, "decided")[0]
        assert job.sent(host, "over") == [EXIT_USER_ERROR]


def test_a_restart_comes_at_once_after_progress_and_later_without(pair):
    job, a, b = pair(restarts=5)
    for number, delay_s in enumerate((0.0, 1.3, 2.5)):
        assert job.sent(a, "start")[-1] == number
        failure = boom(2, step=3, source=f"line {number}")
        for host in (a, b):
            job.end(host, number, "failed", 3, failure)
        assert CloseStart() in job.orders
        assert len(job.starts) == number + 1 + (delay_s == 0.0)
        job.pass_time(delay_s)


@pytest.mark.parametrize(
    ("other", "code"),
    [(None, EXIT_PREEMPTED), (ErrorRecord(0, "PeerLost", "", True, EXIT_SECONDARY), EXIT_PREEMPTED)],
)
def test_a_host_that_is_asked_to_stop_ends_a_fixed_job(pair, other, code):
    job, a, b = pair(restarts=5)
    job.end(b, 0, "left")
    job.end(a, 0, "failed" if other else "preempted", 3, other)
    assert job.code == code


def test_an_interrupted_rank_ends_the_job_without_a_restart(pair):
    job, a, b = pair(restarts=5)
    job.end(b, 0, "interrupted")
    job.end(a, 0, "failed", 3, ErrorRecord(0, "PeerLost", "", True, EXIT_SECONDARY))
    assert job.code == EXIT_INTERRUPT


def test_an_error_beside_a_host_that_was_asked_to_stop_keeps_its_exit_code(pair):
    job, a, b = pair(restarts=5)
    job.end(b, 0, "left")
    job.end(a, 0, "failed", 3, boom(0))
    assert job.code == EXIT_USER_ERROR


def test_an_elastic_job_goes_on_with_the_hosts_that_are_left_at_no_cost():
    job, first, second, third = Job(Size(1, 3)), Member("a", 0), Member("b"), Member("c", nproc=2)
    job.join(first, second)
    assert job.starts == []
    job.pass_time(2.0)  # for others to join with them
    assert job.starts == [OpenStart(0, 2)]
    job.join(third)
    assert job.sent(first, "polite") == job.sent(second, "polite") == [True]
    for host in (first, second):
        job.end(host, 0, "preempted")
    assert job.starts[-1] == OpenStart(1, 4)
    job.event(second, "lost")
    for host in (first, third):
        job.end(host, 1, "preempted")
    job.pass_time(2.0)
    assert job.starts[-1] == OpenStart(2, 3)
    assert job.sent(third, "base_rank") == [2, 1]
    assert job.code is None


def test_an_idle_controller_says_when_it_is_to_be_called_again(pair):
    job, a, b = pair()
    assert job.controller.wake_at == float("inf")
    job.end(b, 0, "failed", 5, boom(2))
    assert job.controller.wake_at == 2.0
    waiting = Job(Size(2, 3), timeout_s=7.0)
    waiting.join(Member("a", 0))
    while waiting.controller.end is None:
        assert waiting.controller.wake_at > waiting.now
        waiting.pass_time(waiting.controller.wake_at - waiting.now)
    assert waiting.now == 7.0
