"""The policy of a job as a state machine, and launchers that connect to the first host over real sockets."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from unittest.mock import Mock

import pytest

from cyxjax.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPT,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_SECONDARY,
    EXIT_USER_ERROR,
)
from cyxjax.launch import output
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group import client, group_start
from cyxjax.launch.group.controller import Controller, Size
from cyxjax.launch.group.group_start import NO_START, Budget, GroupStart, Member, end_message
from cyxjax.launch.group.protocol import MAX_LINE, encode
from cyxjax.launch.options import parse
from cyxjax.launch.supervise import supervisor
from cyxjax.launch.supervise.supervisor import Supervisor
from cyxjax.launch.supervise.worker import Start
from cyxjax.launch.supervise.worker_group import WorkerGroup
from cyxjax.launch.topology import Topology
from tests.support.meeting import TOKEN, Meeting
from tests.support.programs import free_port


class Job:
    """A controller with the messages that it has sent, by host; the test sets `now`."""

    def __init__(self, size, *hosts, restarts=0):
        self.messages, self.starts, self.num_closed, self.now = [], [], 0, 0.0
        self.controller = Controller(size, 30.0, Budget(restarts), 0.0, self)
        self.join(*hosts)

    def send(self, host, message):
        self.messages.append((host, message))

    def drop(self, host):
        self.lose(host)

    def log(self, line):
        """Ignores the log."""

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
        return None if self.controller.end is None else self.controller.end["over"]


FOLLOWS = ErrorRecord(0, "PeerLost", "", True, EXIT_SECONDARY)


def boom(rank=1, **changes):
    return ErrorRecord(rank, "ValueError", "boom", host="b", exit_code=EXIT_USER_ERROR, **changes)


def pair(restarts=0):
    """A running fixed job of 3 ranks on two hosts."""
    a, b = Member("a", 0, 2), Member("b", 2)
    return Job(Size(world_size=3), b, a, restarts=restarts), a, b


def test_a_fixed_job_starts_when_all_its_ranks_are_here_each_host_at_its_own():
    job, a, b = pair()
    assert job.starts == [(0, 3)]
    assert (job.sent(a, "base_rank"), job.sent(b, "base_rank")) == ([0], [2])
    job.end(a, 0)
    assert job.code is None
    job.end(b, 0)
    assert job.code == EXIT_OK
    assert (job.sent(a, "over"), job.sent(b, "over")) == ([0], [0])


@pytest.mark.parametrize(
    ("size", "hosts", "expected"),
    [
        (Size(world_size=3), [Member("a", 0, 2), Member("b", 1, 2)], "do not overlap missing"),
        (Size(world_size=2), [Member("a", 0)], "rank 1 missing"),
        (Size(2, 3), [Member("a", 0)], "at least 2 are needed"),
        (Size(4000, 5000), [Member("a", 0), *(Member(f"node-{n:09}") for n in range(3998))], "at least 4000"),
    ],
)
def test_missing_hosts_are_waited_for_as_long_as_the_timeout_says(size, hosts, expected):
    job = Job(size, *hosts)
    job.pass_time(29.0)
    assert (job.starts, job.code) == ([], None)
    job.pass_time(1.0)
    assert job.code == EXIT_INFRASTRUCTURE
    assert expected in job.sent(hosts[0], "why")[0]
    assert max(len(encode(message)) for _, message in job.messages) < MAX_LINE


@pytest.mark.parametrize(("restarts", "code"), [(0, EXIT_SECONDARY), (1, None)])
def test_a_fixed_job_pays_for_a_lost_host_with_a_restart(restarts, code):
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


def test_an_error_anywhere_decides_for_all_hosts_at_once():
    job, a, b = pair()
    job.end(b, 0, "failed", 5, boom(2))
    assert job.sent(a, "end") == []  # its ranks notice without it
    job.pass_time(3.0)
    assert job.sent(a, "end") == [0]  # unless they do not
    job.end(a, 0, "failed", 5, FOLLOWS)
    assert job.code == EXIT_USER_ERROR
    for host in (a, b):
        assert "rank 2 failed on host b" in job.sent(host, "decided")[0]
        assert job.sent(host, "over") == [EXIT_USER_ERROR]


@pytest.mark.parametrize(("size", "code"), [(Size(world_size=2), EXIT_SECONDARY), (Size(1, 3), None)])
def test_a_host_that_does_not_end_its_ranks_when_it_is_ordered_to_is_given_up(size, code):
    first, other = Member("a", 0), Member("b", 1)
    job = Job(size, first, other)
    job.pass_time(3.0)
    job.end(first, 0, "failed", 5, FOLLOWS)
    job.pass_time(3.0)
    assert job.sent(other, "end") == [0]
    job.pass_time(59.0)
    assert (job.code, len(job.starts)) == (None, 1)
    job.pass_time(1.0)
    assert job.code == code
    job.pass_time(3.0)
    assert job.starts[1:] == ([] if size.is_fixed else [(1, 1)])  # an elastic job continues without it


def test_the_first_host_is_not_given_up():
    job, _, b = pair()
    job.end(b, 0, "failed", 5, FOLLOWS)
    job.pass_time(3.0)
    job.pass_time(600.0)
    assert job.code is None


def test_a_restart_comes_at_once_after_progress_and_later_without():
    job, a, b = pair(restarts=5)
    for number, delay_s in enumerate((0.0, 1.3, 2.5)):
        assert job.sent(a, "start")[-1] == number
        failure = boom(2, step=3, source=f"line {number}")
        for host in (a, b):
            job.end(host, number, "failed", 3, failure)
        assert job.num_closed == number + 1
        assert len(job.starts) == number + 1 + (delay_s == 0.0)
        job.pass_time(delay_s)


@pytest.mark.parametrize(
    ("how", "other", "code"),
    [
        ("left", None, EXIT_PREEMPTED),
        ("left", FOLLOWS, EXIT_PREEMPTED),
        ("left", boom(0), EXIT_USER_ERROR),
        ("interrupted", FOLLOWS, EXIT_INTERRUPT),
    ],
)
def test_a_host_that_is_asked_to_stop_ends_a_fixed_job_without_a_restart(how, other, code):
    job, a, b = pair(restarts=5)
    job.end(b, 0, how)
    job.end(a, 0, "failed" if other else "preempted", 3, other)
    assert job.code == code


@pytest.mark.parametrize(
    ("size", "spares", "code"),
    [(Size(world_size=3), 0, EXIT_PREEMPTED), (Size(world_size=3), 1, None), (Size(1, 2), 0, None)],
)
def test_a_host_that_leaves_between_two_starts_ends_a_fixed_job_that_has_no_other_for_it(size, spares, code):
    base = 2 if size.is_fixed else -1
    job, a, b = Job(size, restarts=9), Member("a", 0, 2), Member("b", base)
    job.join(a, b, *(Member("c", base) for _ in range(spares)))
    for number in range(2):  # the second restart comes after a delay
        for host in (a, b):
            job.end(host, number, "failed", 3, boom(source=f"line {number}"))
    job.end(b, NO_START, "left", -1)
    assert job.code == code
    assert job.sent(a, "over") == ([] if code is None else [code])


def test_a_spare_that_leaves_while_another_host_is_awaited_does_not_end_the_job():
    job, a, b = pair(restarts=1)
    spare = Member("c", 0, 2)  # for a's ranks
    job.join(spare)
    job.lose(b)
    job.end(a, 0, "failed", 3, FOLLOWS)
    job.end(spare, NO_START, "left", -1)
    assert job.code is None


@pytest.mark.parametrize("moment", ["before its ranks begin", "after they have failed"])
def test_a_host_that_leaves_while_only_others_run_ranks_ends_a_fixed_job(moment):
    job, a, b = pair(restarts=9)
    if moment == "after they have failed":
        job.end(b, 0, "failed", 3, FOLLOWS)
    job.end(b, NO_START, "left", -1)
    assert job.sent(a, "end") == ([0] if moment == "before its ranks begin" else [])  # they wait for b's
    job.end(a, 0, "failed", 3, FOLLOWS)
    assert (job.code, job.starts) == (EXIT_PREEMPTED, [(0, 3)])


@pytest.mark.parametrize(("size", "code"), [(Size(world_size=2), EXIT_PREEMPTED), (Size(1, 2), None)])
def test_hosts_that_wait_for_the_ranks_of_one_that_is_asked_to_stop_are_ended(size, code):
    job, a, b = Job(size, restarts=0), Member("a", 0), Member("b", 1 if size.is_fixed else -1)
    job.join(a, b)
    job.pass_time(2.0)
    job.end(b, 0, "left", -1)  # its ranks have not begun
    assert job.sent(a, "end") == [0]
    job.end(a, 0, "preempted", -1)
    job.pass_time(60.0)
    assert job.code == code
    assert len(job.starts) == 1 + (code is None)  # an elastic job continues with the remaining host


def test_a_host_that_is_asked_to_stop_when_its_ranks_have_done_all_changes_nothing():
    job, a, b = pair(restarts=9)
    job.end(b, 0, "ok")
    job.end(b, NO_START, "left", -1)
    job.end(a, 0, "ok")
    assert job.code == EXIT_OK


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


@pytest.mark.parametrize(("restarts", "code"), [(0, EXIT_USER_ERROR), (1, None)])
@pytest.mark.parametrize("change", ["another host joins", "a host leaves"])
def test_an_error_while_an_elastic_job_changes_its_size_is_an_error(restarts, code, change):
    job, first, second = Job(Size(1, 3), restarts=restarts), Member("a", 0), Member("b")
    job.join(first, second)
    job.pass_time(2.0)
    if change == "another host joins":
        job.join(Member("c"))
    job.end(second, 0, "preempted" if change == "another host joins" else "left")
    job.end(first, 0, "failed", 3, boom(0))  # a failed save, for example
    assert "rank 0 failed on host b" in job.sent(first, "decided")[0]
    assert job.code == code


def test_below_the_fewest_an_elastic_job_waits_for_another_host_and_then_ends():
    job, first, second = Job(Size(2, 3)), Member("a", 0), Member("b")
    job.join(first, second)
    job.pass_time(2.0)
    job.lose(second)
    job.end(first, 0, "preempted")
    job.pass_time(29.0)
    assert job.code is None
    job.pass_time(1.0)
    assert (job.code, job.starts) == (EXIT_INFRASTRUCTURE, [(0, 2)])


def test_a_spare_waits_and_takes_the_place_of_a_host_that_goes():
    job, first, second, spare = Job(Size(1, 2)), Member("a", 0), Member("b"), Member("c", nproc=2)
    another = Member("d")
    job.join(first, second, spare, another)
    assert job.starts == [(0, 2)]
    assert job.sent(spare, "say") == ["all places are taken: this host waits until another one leaves"]
    job.lose(second)
    job.end(first, 0, "preempted")
    assert job.starts[-1] == (1, 3)
    assert job.sent(spare, "base_rank") == [1]
    assert (job.sent(another, "start"), len(job.sent(another, "say"))) == ([], 2)


def failure(kind="SIGKILL", code=EXIT_INFRASTRUCTURE):
    return ErrorRecord(1, kind, "m", exit_code=code, step=3)


BUG = failure("ValueError", EXIT_USER_ERROR)
EXIT = ErrorRecord(1, "exit", "ended with exit code 1", exit_code=EXIT_USER_ERROR)  # no error, no step
ENDINGS = {
    "all 5 restarts are used": (5, [(EXIT, -1)] * 6, EXIT_INFRASTRUCTURE),
    "all 2 restarts are used": (2, [(failure(), 3), (failure(), 9), (failure(), 15)], EXIT_INFRASTRUCTURE),
    "the same error at step 3": (10, [(BUG, 3), (BUG, 3)], EXIT_USER_ERROR),
    "all 2000 restarts are used": (2000, [(failure(), -1)] * 2001, EXIT_INFRASTRUCTURE),  # no steps reported
    "came no further than step 3": (100, [(failure(), 3)] * 4, EXIT_INFRASTRUCTURE),
    "all 19 restarts are used": (
        19,
        [(failure(), 3)] * 3 + [(failure(), step) for step in range(4, 21)],
        EXIT_INFRASTRUCTURE,
    ),
    "a configuration error": (5, [(failure("ConfigError", EXIT_CONFIG), -1)], EXIT_CONFIG),
    "--max-restarts is 0": (0, [(BUG, 3)], EXIT_USER_ERROR),
}


@pytest.mark.parametrize(("restarts", "failures", "code"), ENDINGS.values(), ids=ENDINGS)
def test_a_job_is_not_started_again_for_ever(request, restarts, failures, code):
    budget = Budget(restarts)
    *before, last = [budget.decide(record, step) for record, step in failures]
    assert all(decision.again for decision in before)
    assert (last.again, last.exit_code) == (False, code)
    assert request.node.callspec.id in last.line


def test_a_host_with_a_wrong_clock_does_not_get_another_rank_blamed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(group_start.time, "monotonic", lambda: now[0])
    follower, cause = Member("follower"), Member("cause")
    current = GroupStart(3, dict.fromkeys([cause, follower]))

    def reports(host, rank, clock_s, age_s, time_of_day_s):
        """A host whose monotonic clock shows `clock_s` reports an error that is `age_s` old."""
        record = ErrorRecord(rank, "ValueError", "", at_s=time_of_day_s, at_monotonic_s=clock_s - age_s)
        now[0] = clock_s
        current.note_end(host, json.loads(json.dumps(end_message(3, "failed", 7 - rank, record))), 100.0)

    # Rank 1 failed 0.5 s before rank 0, on a host that has been up longer and whose clock is an hour ahead.
    reports(follower, 0, clock_s=50.0, age_s=0.1, time_of_day_s=1_000_000.5)
    reports(cause, 1, clock_s=9_000.0, age_s=0.6, time_of_day_s=1_003_600.0)
    assert (current.failure.rank, current.step) == (1, 7)
    assert round(current.failure.at_monotonic_s, 3) == 99.4


@pytest.fixture
def first():
    """The first host of a fixed job of two hosts with one rank each."""
    with closing(Meeting(2, Size(world_size=2))) as meeting:
        yield meeting


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
    channel = first.introduce()
    call = channel.next()
    assert call == {"start": 0, "base_rank": 1, "world_size": 2}
    channel.send(message)
    assert channel.next() is None
    assert first.own.next() == call | {"base_rank": 0}
    assert first.own.next() == {"end": 0, "polite": False}
    assert "host h is gone" in first.log
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
    assert named in first.introduce(**changes).next()["refused"]
    assert len(first.server.hosts.controller.hosts) == 1


def test_a_second_launcher_of_the_same_ranks_waits_for_the_first_to_go(first):
    other = first.introduce()
    assert other.next()["start"] == 0
    second = first.introduce(host="again")
    assert "waits until another one leaves" in second.next()["say"]
    other.close()
    assert [first.own.next().get("start"), first.own.next().get("end")] == [0, 0]
    first.own.send(end_message(0, "preempted", 3))
    assert second.next()["decided"].startswith("host h is gone; not started again")


def launcher(hosts, node_rank, port, *flags):
    """The launcher of one of `hosts` hosts, whose first one listens at `port`."""
    words = ["--nnodes", hosts, "--node-rank", node_rank, "--master-addr", "127.0.0.1", "--master-port", port]
    words += ["--run-id", "job", *flags, "--no-python", "true"]
    return Supervisor(parse([str(word) for word in words], {"CYXJAX_TOKEN": TOKEN}), {})


def test_a_launcher_that_is_asked_to_stop_while_it_waits_for_others_tells_the_first_host():
    with closing(Meeting(3, Size(world_size=3))) as first:
        host = launcher(3, 1, first.port)
        host._workers.put(signal.SIGTERM)
        assert host.run() == EXIT_PREEMPTED
        assert first.own.next()["over"] == EXIT_PREEMPTED


def test_an_error_of_the_first_host_s_launcher_ends_the_job_with_it_on_all_hosts(monkeypatch):
    monkeypatch.setattr(WorkerGroup, "run", Mock(side_effect=OSError("no room")))
    port = free_port()
    first = launcher(2, 0, port, "--max-restarts", "3")
    hello = {"host": "h", "nproc": 1, "base_rank": 1, "world_size": 2, "run_id": "job"}
    where = client.Server(Topology(master_port=port, token=TOKEN), "host h", "the test")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.connect, where, hello, print)
        with pytest.raises(OSError, match="room"):
            first.run()
        [over] = [message for message in iter(other.result().next, None) if "over" in message]
        other.result().close()
    assert over["over"] == EXIT_INFRASTRUCTURE
    assert "no room" in over["why"]


def test_a_first_host_that_says_nothing_after_a_failure_counts_as_gone(first, monkeypatch):
    failed = Start(0, [], [ErrorRecord(1, "PeerLost", "", True, EXIT_SECONDARY)])
    monkeypatch.setattr(WorkerGroup, "run", Mock(return_value=failed))
    monkeypatch.setattr(Controller, "hear", Mock())  # it is suspended
    monkeypatch.setattr(supervisor, "SILENT_S", -29.5)  # the timeout has 30 s
    assert launcher(2, 1, first.port).run() == EXIT_SECONDARY


@pytest.mark.parametrize(("hosts", "node_rank", "is_shown"), [(1, 0, True), (2, 1, False)])
def test_the_first_of_errors_like_a_lost_peer_s_is_shown_whole_if_no_other_host_can_be_its_cause(
    capfd, tmp_path, hosts, node_rank, is_shown
):
    host = launcher(hosts, node_rank, free_port(), "--log-dir", tmp_path)
    nccl = ErrorRecord(0, "XlaRuntimeError", "INTERNAL: NCCL", True, EXIT_SECONDARY, traceback="at train.py")
    host._failed = Start(0, [], [nccl])
    host._take_part = partial(host._show, "not started again")
    host.run()
    output.flush()
    assert ("at train.py" in capfd.readouterr().err) == is_shown
    assert (nccl.exit_code, host._followed) == (EXIT_SECONDARY, True)


def test_a_launcher_is_refused_where_ranks_were_started_by_hand():
    with closing(Meeting()) as by_hand:
        assert "without a launcher" in by_hand.introduce(nproc=1).next()["refused"]
