"""The policy of a job as a state machine, and launchers as the first host sees them over real sockets."""

import json

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
from cyxjax.launch.group import client, group_start
from cyxjax.launch.group.controller import Controller, Size
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.group.group_start import Budget, GroupStart, Member, end_message
from cyxjax.launch.local_ranks import LocalRanks


class Job:
    """A controller with the messages it has sent, by host; `now` is set by hand."""

    def __init__(self, size, restarts=0, timeout_s=30.0):
        self.messages, self.starts, self.num_closed, self.now = [], [], 0, 0.0
        self.controller = Controller(size, timeout_s, Budget(restarts), 0.0, self)

    def send(self, host, message):
        self.messages.append((host, message))

    def log(self, line):
        """Nobody watches."""

    def open_start(self, number, world_size):
        self.starts.append((number, world_size))

    def close_start(self):
        self.num_closed += 1

    def pass_time(self, seconds):
        self.now += seconds
        self.controller.act(self.now)

    def lose(self, host):
        self.controller.lose(host, self.now)

    def join(self, *hosts):
        for host in hosts:
            self.controller.join(host, self.now)

    def end(self, host, number, how="ok", step=3, first=None):
        self.controller.hear(host, end_message(number, how, step, first), self.now)

    def sent(self, host, key):
        return [message[key] for to, message in self.messages if to is host and key in message]

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
    assert job.starts == [(0, 3)]
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
    job.lose(b)
    assert job.sent(a, "end") == [0]
    job.end(a, 0, "preempted")
    assert job.code == code
    if restarts:
        assert job.starts == [(0, 3)]  # it waits for the host
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
        assert job.num_closed == number + 1
        assert len(job.starts) == number + 1 + (delay_s == 0.0)
        job.pass_time(delay_s)


FOLLOWS = ErrorRecord(0, "PeerLost", "", True, EXIT_SECONDARY)


@pytest.mark.parametrize(
    ("how", "other", "code"),
    [
        ("left", None, EXIT_PREEMPTED),
        ("left", FOLLOWS, EXIT_PREEMPTED),
        ("left", boom(0), EXIT_USER_ERROR),
        ("interrupted", FOLLOWS, EXIT_INTERRUPT),
    ],
)
def test_a_host_that_is_asked_to_stop_ends_a_fixed_job_without_a_restart(pair, how, other, code):
    job, a, b = pair(restarts=5)
    job.end(b, 0, how)
    job.end(a, 0, "failed" if other else "preempted", 3, other)
    assert job.code == code


def test_an_elastic_job_goes_on_with_the_hosts_that_are_left_at_no_cost():
    job, first, second, third = Job(Size(1, 3)), Member("a", 0), Member("b"), Member("c", nproc=2)
    job.join(first, second)
    assert job.starts == []
    job.pass_time(2.0)  # for others to join with them
    assert job.starts == [(0, 2)]
    job.join(third)
    assert job.sent(first, "polite") == job.sent(second, "polite") == [True]
    for host in (first, second):
        job.end(host, 0, "preempted")
    assert job.starts[-1] == (1, 4)
    job.lose(second)
    for host in (first, third):
        job.end(host, 1, "preempted")
    job.pass_time(2.0)
    assert job.starts[-1] == (2, 3)
    assert job.sent(third, "base_rank") == [2, 1]
    job.end(third, 2, "left")  # its connection ends later
    job.end(first, 2, "preempted")
    job.pass_time(2.0)
    assert job.starts[-1] == (3, 1)
    assert job.code is None


def test_a_host_with_a_wrong_clock_does_not_get_another_rank_blamed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(group_start.time, "monotonic", lambda: now[0])
    follower, cause = Member("follower"), Member("cause")
    current = GroupStart(3, dict.fromkeys([cause, follower]))

    def reports(host, rank, clock_s, age_s, time_of_day_s):
        """A host whose monotonic clock stands at `clock_s` reports an error `age_s` old."""
        record = ErrorRecord(rank, "ValueError", "", at_s=time_of_day_s, at_monotonic_s=clock_s - age_s)
        now[0] = clock_s
        current.note_end(host, json.loads(json.dumps(end_message(3, "failed", 7, record))), 100.0)

    # Rank 1 failed 0.5 s before rank 0, on a host that has been up longer and whose clock is an hour ahead.
    reports(follower, 0, clock_s=50.0, age_s=0.1, time_of_day_s=1_000_000.5)
    reports(cause, 1, clock_s=9_000.0, age_s=0.6, time_of_day_s=1_003_600.0)
    assert (current.failure.rank, current.step) == (1, 7)
    assert round(current.failure.at_monotonic_s, 3) == 99.4


@pytest.fixture
def first():
    """The first host of a fixed job of two hosts with a rank each; `own` is its own connection."""
    log: list[str] = []
    place = LocalRanks(1, 0, 2, "127.0.0.1", 0, "job", token="secret")
    coordinator = Coordinator(place, log.append, serves=False)
    coordinator.own, coordinator.said = coordinator.lead(Size(world_size=2), 0), log
    coordinator.channels = [coordinator.own]
    yield coordinator
    coordinator.end()
    for channel in coordinator.channels:
        channel.close()


def connect(first, **changes):
    """The connection of the other host's launcher."""
    hello = {"host": "h", "nproc": 1, "run_id": "job", "base_rank": 1, "world_size": 2} | changes
    where = client.Server("127.0.0.1", first.place.master_port, "secret", 10.0, "host h", "the test")
    channel = client.connect(where, hello, print)
    channel.socket.settimeout(20)
    first.channels.append(channel)
    return channel


@pytest.mark.parametrize(
    "message",
    [
        {"ended": 0},
        {"ended": 0, "how": "ok", "step": "far", "first": None},
        {"ended": 0, "how": "failed", "step": 1, "first": {"unknown": 1}, "age_s": 1},
        {"ended": 0, "how": "failed", "step": 1, "first": [1], "age_s": "now"},
    ],
)
def test_a_host_that_sends_nonsense_is_left_out_and_the_job_ends_for_all(first, message):
    channel = connect(first)
    call = channel.next()
    assert call == {"start": 0, "base_rank": 1, "world_size": 2}
    channel.send(message)
    assert channel.next() is None
    assert first.own.next() == call | {"base_rank": 0}
    assert first.own.next() == {"end": 0, "polite": False}
    assert "host h is gone" in first.said
    assert first.server.thread.is_alive()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run_id": "other"}, "belongs to job 'job'"),
        ({"world_size": 3}, "WORLD_SIZE=3"),
        ({"base_rank": 0}, "--node-rank"),
        ({"base_rank": 2}, "--node-rank"),
        ({"nproc": 0}, "--node-rank"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_and_told_why(first, changes, named):
    assert named in connect(first, **changes).next()["refused"]
    assert len(first.server.hosts.controller.hosts) == 1


def test_a_second_launcher_of_the_same_ranks_waits_for_the_first_to_go(first):
    other = connect(first)
    assert other.next()["start"] == 0
    second = connect(first, host="again")
    assert "waits until another one leaves" in second.next()["say"]
    other.close()
    assert [first.own.next().get("start"), first.own.next().get("end")] == [0, 0]
    first.own.send(end_message(0, "preempted", 3))
    assert second.next()["decided"].startswith("host h is gone; not started again")


def test_a_launcher_is_refused_where_ranks_were_started_by_hand():
    by_hand = Coordinator(LocalRanks(1, 0, 2, "127.0.0.1", 0, "job", token="secret"), print, serves=False)
    by_hand.open(0)
    by_hand.channels = []
    assert "without a launcher" in connect(by_hand).next()["refused"]
    by_hand.channels[0].close()
    by_hand.end()
