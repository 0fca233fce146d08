"""Ranks as threads with a real server: forming, refusals, losses, and strangers at its port."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest

from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch import connect
from cyxjax.launch.group import client, ports, server
from cyxjax.launch.group.client import GroupConnection
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.group.rendezvous import Rendezvous
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.options import Options
from cyxjax.launch.supervise.supervisor import Supervisor
from cyxjax.launch.topology import Topology
from tests.support.meeting import RANK, Meeting, by_hand
from tests.support.programs import free_port
from tests.support.waiting import until


@pytest.fixture
def meet():
    """Creates a meeting for a number of ranks, closed after the test."""
    with ExitStack() as made:
        yield lambda *args, **changes: made.enter_context(closing(Meeting(*args, **changes)))


def test_a_group_forms_and_a_goodbye_is_no_death(meet):
    meeting, lost = meet(3), []
    members = meeting.join_all(0, 1, 2)
    address = members[0].coordinator["address"]
    assert [member.coordinator for member in members] == [{"address": address, "served": False}] * 3
    assert {member.own_address for member in members} == {"127.0.0.1"}
    assert {member._channel.socket.gettimeout() for member in members} == {None}  # steps may take long
    assert {"python", "jax", "jaxlib"} <= set(client.versions())  # must be equal on all
    members[0].watch(lost.append)
    members[1].leave()
    assert until(lambda: set(meeting.first.ranks.here) == {0, 2}, 30)
    assert not until(lambda: lost, 0.2)


def test_more_ranks_than_pending_connections_all_meet_at_once(meet, monkeypatch):
    monkeypatch.setattr(server, "MAX_PENDING", 32)
    ranks = server.MAX_PENDING + 40
    members = meet(ranks, timeout_s=60).join_all(*range(ranks), timeout_ms=60_000)
    assert [type(member) for member in members] == [GroupConnection] * ranks


def test_a_rank_of_another_world_size_that_comes_first_is_remembered(meet):
    meeting = meet(3)
    for message in (meeting.join_all(1, world_size=2)[0], meeting.join_all(0)[0]):
        assert "ranks differ in WORLD_SIZE: 2 on rank 1, 3 on the others" in message


def test_a_rank_that_dies_while_the_group_forms_may_come_again(meet):
    meeting = meet(3)
    doomed = meeting.introduce(rank=1)
    assert until(lambda: 1 in meeting.first.ranks.here, 30)
    doomed.close()
    assert until(lambda: not meeting.first.ranks.here, 30)
    assert {type(member) for member in meeting.join_all(0, 1, 2)} == {GroupConnection}


def test_a_start_waits_as_long_as_its_most_patient_rank(meet):
    meeting = meet(3)
    meeting.introduce(rank=1, timeout_s=1.5)
    assert until(lambda: 1 in meeting.first.ranks.here, 30)
    assert "rank 2 after 1.5 s" in meeting.join_all(0, timeout_ms=300)[0]


def test_a_service_that_cannot_start_is_told_to_all(meet, monkeypatch):
    monkeypatch.setattr(ports, "reserve", Mock(side_effect=OSError("no port")))
    assert all("could not start: no port" in message for message in meet(2).join_all(0, 1))


def test_the_first_loss_is_told_to_the_others_and_no_other_is(meet):
    """All ranks then fail because of it: reporting each failure to all would be a million lines."""
    meeting = meet(4)
    members = meeting.join_all(0, 1, 2, 3)
    lost, notified = [], threading.Semaphore(0)
    for member in members[:2]:
        member.watch(lambda why: (lost.append(why), notified.release()))
    members[2].fail("ValueError: boom (train.py:8)")
    for _ in range(2):
        assert notified.acquire(timeout=5)
    assert all(why.startswith("lost rank 2 (host ") and "boom (train.py:8)" in why for why in lost)
    for gone in members[:3]:
        gone._channel.socket.shutdown(socket.SHUT_RDWR)
    assert until(lambda: list(meeting.first.ranks.here) == [3], 30)
    members[3]._channel.socket.shutdown(socket.SHUT_WR)
    received = b""
    while data := members[3]._channel.socket.recv(4096):
        received += data
    assert received.count(b'"lost"') == 1


def test_a_rank_of_a_restart_that_has_not_begun_here_is_to_try_again(meet):
    assert "did not admit rank 0" in meet(1).join_all(0, restart_count=1, timeout_ms=300)[0]
    broken = meet(2)
    members = broken.join_all(0, 1)
    members[1]._channel.close()
    assert until(lambda: list(broken.first.ranks.here) == [0], 30)
    assert "did not admit rank 1" in broken.join_all(1, timeout_ms=300)[0]  # not: taken


@pytest.mark.parametrize(("led", "ended"), [(True, 0), (False, 1)])
def test_a_late_rank_of_an_earlier_start_and_size_ends_no_start_that_launchers_lead(led, ended):
    server, here, late = Mock(), Mock(), Mock()
    start = Rendezvous(3, Mock(), server, Mock(), run_id="job", generation=1, is_led=led)
    start.welcome(here, RANK | {"world_size": 3, "generation": 1})
    start.welcome(late, RANK | {"rank": 1})
    assert server.refuse.call_args.args[0] is late
    assert (here.send.call_count, len(start.here)) == (ended, 1 - ended)


def test_a_server_that_does_not_greet_yet_is_tried_again_for_the_timeout(meet, monkeypatch):
    """When thousands connect at once, the kernel accepts connections that the server only reads later."""
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    meeting, real, knocks = meet(1), socket.create_connection, []

    def create_connection(where, **options):
        knocks.append(where)
        return real(where if len(knocks) > 1 else deaf.getsockname(), **options)

    with ports.listen("127.0.0.1", 0) as deaf:
        with pytest.raises(GroupError, match=r"127\.0\.0\.1:\d+ .*HINT"):
            client.join(Topology(1, 2, master_port=deaf.getsockname()[1], timeout_ms=300))
        monkeypatch.setattr(client.socket, "create_connection", create_connection)
        assert isinstance(meeting.join(0), GroupConnection)
    assert len(knocks) == 2


@pytest.mark.parametrize(
    ("address", "nproc", "token", "lines"),
    [("0.0.0.0", 1, "", 1), ("0.0.0.0", 1, "secret", 0), ("0.0.0.0", 2, "", 0), ("127.0.0.1", 1, "", 0)],
)
def test_rank_0_of_a_job_across_hosts_warns_once_without_a_token(capfd, address, nproc, token, lines):
    # As a rank that is started by hand, srun or mpirun, without a launcher that could warn.
    topology = by_hand(master_addr=address, local_world_size=nproc, token=token)[0]
    connect._coordinate(topology).end()
    assert capfd.readouterr().err.count("CYXJAX_TOKEN is not set: whoever reaches 0.0.0.0 can join") == lines


def test_a_program_that_spawns_ranks_keeps_the_level_of_native_logs_that_was_set(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    Coordinator(LocalRanks(1, 0, 1, "127.0.0.1", 0, "job")).end()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"


def test_all_are_told_why_no_group_forms_before_rank_0_ends(monkeypatch):
    # Rank 0 gets the error first and ends, with the server in its process: rank 1 used to retry for a minute.
    sent, ending, end, send = [], threading.Event(), Coordinator.end, server.Peer.send

    def slow_send(self, message):
        if "abort" in message and sent:
            ending.wait(10)
        send(self, message)
        sent.extend(["abort"] if "abort" in message else [])

    monkeypatch.setattr(server.Peer, "send", slow_send)
    monkeypatch.setattr(Coordinator, "end", lambda self: (ending.set(), end(self)))
    made, coordinate = [], connect._coordinate
    monkeypatch.setattr(connect, "_coordinate", lambda place: made.append(coordinate(place)) or made[0])
    rank_0, rank_1 = by_hand()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(connect._meet, rank_0, {"program": "train.py"}, None, {})
        assert until(lambda: made and 0 in made[0].ranks.here, 10)
        one = pool.submit(client.join, rank_1, {"program": "other.py"})
        for received in (zero, one):
            with pytest.raises(GroupError, match=r"program: train\.py .*rank 0; other\.py .*rank 1"):
                received.result(30)


def test_a_rank_that_comes_before_rank_0_waits_for_it(monkeypatch):
    monkeypatch.setattr(client, "LINE_EVERY_S", 0.0)
    rank_0, rank_1 = by_hand()
    log = []
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(client.join, rank_1, log=log.append)
        assert until(lambda: log, 10)  # no server yet
        host = connect._coordinate(rank_0)
        for member in (client.join(rank_0), early.result(30)):
            member.leave()
    assert log[0] == f"rank 1 waits for 127.0.0.1:{rank_0.master_port}: Connection refused"
    host.end()


@pytest.mark.parametrize(
    ("addr", "message"),
    [
        ("no-such-host.invalid", r"MASTER_ADDR='no-such-host\.invalid' .*HINT"),
        ("127.0.0.9", r"^Connection refused .*127\.0\.0\.9:\d+ .*HINT"),
        ("node1", r"MASTER_ADDR=node1 .*127\.0\.1\.1.* 1 .*2 ranks"),  # Debian's entry for its own host name
    ],
)
def test_a_wrong_address_says_in_which_way(monkeypatch, addr, message):
    if addr == "node1":
        monkeypatch.setattr(ports, "resolve", lambda host, port: [(socket.AF_INET, ("127.0.1.1", port))])
    elif addr != "127.0.0.9":  # without a question to a name server
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    _, rank_1 = by_hand(master_addr=addr, local_world_size=1, timeout_ms=300)
    with pytest.raises(GroupError, match=message):
        client.join(rank_1)


def test_a_launcher_that_only_its_own_host_could_reach_says_so(monkeypatch):
    monkeypatch.setattr(ports, "resolve", lambda host, port: [(socket.AF_INET, ("127.0.1.1", port))])
    with pytest.raises(GroupError, match=r"MASTER_ADDR=node1 .*127\.0\.1\.1.* 1 .*2 ranks"):
        Supervisor(Options(LocalRanks(1, 0, 2, "node1", free_port(), "job"), ["true"]), {})


def test_an_address_of_another_host_on_rank_0():
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=192\.0\.2\.99 .*HINT"):
        ports.listen("192.0.2.99", free_port())


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_a_port_held_by_a_sharing_program_is_refused(family, address):
    with socket.socket(family) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((address, 0))
        other.listen()
        with pytest.raises(GroupError, match=r"Port \d+ .*127\.0\.0\.1 .*MASTER_PORT"):
            ports.listen("127.0.0.1", other.getsockname()[1])
