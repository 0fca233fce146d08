"""Launchers as the first host sees them: who is admitted, refused, left out, or waits."""

import json
import socket

import pytest

from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group import group_start, protocol
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.group.group_start import GroupStart, Member, end_message
from cyxjax.launch.group.handshake import introduce
from cyxjax.launch.local_ranks import LocalRanks
from tests.support.waiting import until

HOST = {"host": "h", "nproc": 1, "run_id": "job", "base_rank": 1, "world_size": 2}
NO_ENDS = [
    {"ended": 0},
    {"ended": 0, "how": "well"},
    {"ended": 0, "how": ["failed"], "step": 1},
    {"ended": 0, "how": "ok", "step": "far"},
    {"ended": 0, "how": "failed", "step": 1, "first": {"unknown": 1}},
    {"ended": 0, "how": "failed", "step": 1, "first": {"rank": "0", "age_s": 1}},
    {"ended": 0, "how": "failed", "step": 1, "first": {"age_s": "now"}},
    {"ended": 0, "how": "failed", "step": 1, "first": [1]},
]


def peer(name="h"):
    return Member(name, 0)


@pytest.mark.parametrize("message", NO_ENDS)
def test_what_is_no_end_is_refused_before_anything_is_kept(message):
    host = peer()
    start = GroupStart(0, [host])
    with pytest.raises((KeyError, TypeError, ValueError)):
        start.note_end(host, message, 0.0)
    assert start.running == [host]


def test_the_end_that_a_host_reports_is_kept_and_cannot_steer_a_terminal():
    record = ErrorRecord(1, "Err\x1b[31m", "boom\n  rank 0: here\x07", host="n\x1b1", exit_code=7, step=4)
    host = peer()
    start = GroupStart(0, [host])
    start.note_end(host, protocol.decode(protocol.encode(end_message(0, "failed", 4, record))[:-1]), 0.0)
    kept = start.failure
    assert kept is not None
    assert (kept.rank, kept.exit_code, kept.step, start.step) == (1, 7, 4, 4)
    assert (kept.type, kept.host) == ("Err\\x1b[31m", "n\\x1b1")
    assert kept.message == "boom\n  rank 0: here\\x07"


def test_a_host_with_a_wrong_clock_does_not_get_another_rank_blamed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(group_start.time, "monotonic", lambda: now[0])
    follower, cause = peer("follower"), peer("cause")
    current = GroupStart(3, [cause, follower])

    def reports(host, rank, clock_s, age_s, time_of_day_s):
        """A host whose monotonic clock stands at `clock_s` reports an error `age_s` old."""
        record = ErrorRecord(rank, "ValueError", "", at_s=time_of_day_s, at_monotonic_s=clock_s - age_s)
        now[0] = clock_s
        current.note_end(host, json.loads(json.dumps(end_message(3, "failed", 7, record))), 100.0)

    # Rank 1 failed 0.5 s before rank 0, on a host that has been up longer and whose clock is an hour ahead.
    reports(follower, 0, clock_s=50.0, age_s=0.1, time_of_day_s=1_000_000.5)
    reports(cause, 1, clock_s=9_000.0, age_s=0.6, time_of_day_s=1_003_600.0)
    assert current.failure.rank == 1
    assert round(current.failure.at_monotonic_s, 3) == 99.4


@pytest.fixture
def job():
    """The first host of a fixed job of two hosts with a rank each; `own` is its own connection."""
    log: list[str] = []
    place = LocalRanks(1, 0, 2, "127.0.0.1", 0, "job", token="secret")
    coordinator = Coordinator(place, log.append, serves=False)
    coordinator.own, coordinator.log = coordinator.lead(Size(world_size=2), 0), log
    coordinator.channels = [coordinator.own]
    yield coordinator
    coordinator.end()
    for channel in coordinator.channels:
        channel.close()


def join(job, **changes):
    connection = socket.create_connection(("127.0.0.1", job.place.master_port), timeout=10)
    channel = protocol.Channel(connection)
    job.channels.append(channel)
    assert introduce(channel, HOST | changes, "secret", 10)
    return channel


def test_a_host_that_sends_nonsense_is_left_out_and_the_job_ends_for_all(job):
    channel = join(job)
    call = channel.next(20)
    assert call == {"start": 0, "base_rank": 1, "world_size": 2}
    channel.send({"ended": 0, "how": 7})
    assert "host h is left out" in channel.next(20)["refused"]
    assert any("host h is left out" in line for line in job.log)
    assert job.own.next(5) == call | {"base_rank": 0}
    assert job.own.next(5) == {"end": 0, "polite": False}
    assert job.server.reactor.thread.is_alive()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run_id": "other"}, "belongs to job 'job'"),
        ({"world_size": 3}, "WORLD_SIZE=3"),
        ({"base_rank": 0}, "--node-rank"),
        ({"base_rank": 2}, "--node-rank"),
        ({"nproc": 0}, "without a name or ranks"),
        ({"base_rank": None}, "--node-rank"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_and_told_why(job, changes, named):
    channel = join(job, **changes)
    assert named in channel.next(10)["refused"]
    assert len(job.server.hosts.controller.hosts) == 1


def test_a_second_launcher_of_the_same_ranks_waits_for_the_first_to_go(job):
    first = join(job)
    assert first.next(10)["start"] == 0
    second = join(job, host="again")
    assert "rank 1 of 2 are taken" in second.next(10)["say"]
    first.close()
    assert [job.own.next(10).get("start"), job.own.next(10).get("end")] == [0, 0]
    job.own.send(end_message(0, "preempted", 3))
    assert second.next(10)["decided"].startswith("host h is gone; not started again")


def test_an_error_of_ours_ends_the_job_instead_of_leaving_hosts_to_wait(job, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(job.server.hosts.controller, "_note", broken)
    join(job)
    assert "ZeroDivisionError" in job.own.next(10)["why"]
    assert until(lambda: job.server.hosts.controller.end is not None, 5)
