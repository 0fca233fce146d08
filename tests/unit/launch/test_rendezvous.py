"""Ranks as threads around a real server: forming, refusing, losing, and what else may answer at its port."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch import connect
from cyxjax.launch.group import client, ports, rendezvous, server
from cyxjax.launch.group.client import GroupConnection
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.group.rendezvous import Job, Rendezvous
from cyxjax.launch.topology import Topology
from tests.support.waiting import until


class Place:
    """A meeting place with its log, and topologies that lead to it."""

    def __init__(self, world_size, timeout_s=10.0, open_coordinator=lambda job: {"address": "x:1"}):
        self.log: list[str] = []
        self.members: list[GroupConnection] = []
        self.listener = ports.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.job = Job(world_size, "job", timeout_s=timeout_s)
        self.server = server.GroupServer(self.listener, "secret", self.log.append)
        self.ranks = Rendezvous(self.job, open_coordinator, self.server, self.log.append)
        self.server.ranks = self.ranks
        self.server.start()

    def join(self, rank, **changes):
        place = {"world_size": self.job.world_size, "token": "secret", "run_id": "job", "timeout_ms": 8000}
        topology = Topology(rank, master_port=self.port, hosted=True, **(place | changes))
        member = client.join(topology, log=self.log.append)
        self.members.append(member)
        return member

    def close(self):
        for member in self.members:
            member.leave()
        self.server.close()
        self.listener.close()

    def join_all(self, *ranks, **changes):
        """The outcome for each: a GroupConnection or the GroupError it raised."""

        def outcome(rank):
            try:
                return self.join(rank, **changes)
            except GroupError as error:
                return str(error)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(outcome, ranks))


@pytest.fixture
def place():
    with contextlib.ExitStack() as stack:

        def build(world_size, **job):
            place = Place(world_size, **job)
            stack.callback(place.close)
            return place

        yield build


def test_a_group_forms_and_learns_the_coordinator(place):
    members = place(3).join_all(0, 1, 2)
    assert [member.coordinator for member in members] == [{"address": "x:1"}] * 3
    assert {member.own_address for member in members} == {"127.0.0.1"}
    assert {member._channel.socket.gettimeout() for member in members} == {None}  # steps may take long
    assert {"python", "jax", "jaxlib"} <= set(client.versions())  # must be equal on all


def test_more_ranks_than_pending_connections_all_meet_at_once(place):
    ranks = server.MAX_PENDING + 40
    members = place(ranks, timeout_s=60.0).join_all(*range(ranks), timeout_ms=60_000)
    assert [type(member) for member in members] == [GroupConnection] * ranks


def test_a_rank_of_another_world_size_that_comes_first_is_remembered(place):
    meeting = place(3)
    for said in (meeting.join_all(1, world_size=2)[0], meeting.join_all(0)[0]):
        assert "ranks differ in WORLD_SIZE: 2 on rank 1, 3 on the others" in said


def test_a_service_that_cannot_start_is_told_to_all(place):
    def fail(job):
        raise RuntimeError("no port")

    meeting = place(2, open_coordinator=fail)
    assert all("could not start: no port" in said for said in meeting.join_all(0, 1))


def test_the_first_loss_is_told_to_the_others_and_no_other_is(place):
    """Those that die of it are as many as there are ranks: each told to all would be a million lines."""
    meeting = place(4)
    members = meeting.join_all(0, 1, 2, 3)
    lost, heard = [], threading.Semaphore(0)
    for member in members[:2]:
        member.watch(lambda why: (lost.append(why), heard.release()))
    members[2].fail("ValueError: boom (train.py:8)")
    for _ in range(2):
        assert heard.acquire(timeout=5)
    assert all(why.startswith("lost rank 2 (host ") and "boom (train.py:8)" in why for why in lost)
    for gone in members[:3]:
        gone._channel.socket.shutdown(socket.SHUT_RDWR)
    assert until(lambda: list(meeting.ranks.here) == [3], 5)
    members[3]._channel.socket.shutdown(socket.SHUT_WR)
    told = b""
    while data := members[3]._channel.socket.recv(4096):
        told += data
    assert told.count(b'"lost"') == 1


def test_a_goodbye_is_no_death(place):
    meeting = place(2)
    members = meeting.join_all(0, 1)
    lost: list[str] = []
    members[0].watch(lost.append)
    members[1].leave()
    assert until(lambda: list(meeting.ranks.here) == [0], 5)
    assert not until(lambda: lost, 0.2)


def test_a_rank_of_a_restart_that_has_not_begun_here_is_to_try_again(place):
    newer = place(1)
    assert "did not admit rank 0" in newer.join_all(0, restart_count=1, timeout_ms=300)[0]
    broken = place(2)
    members = broken.join_all(0, 1)
    members[1]._channel.close()
    assert until(lambda: list(broken.ranks.here) == [0], 5)
    assert "did not admit rank 1" in broken.join_all(1, timeout_ms=300)[0]  # not: taken


def test_a_loopback_name_in_a_job_of_several_hosts(monkeypatch):
    monkeypatch.setattr(ports, "resolve", lambda host, port: [(socket.AF_INET, ("127.0.1.1", port))])
    topology = Topology(1, 4, local_world_size=2, master_addr="node1", timeout_ms=300)
    with pytest.raises(GroupError, match=r"MASTER_ADDR=node1 .*127\.0\.1\.1.* 2 .*4 ranks"):
        client.join(topology)


@pytest.mark.parametrize(
    "greeting",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b'{"cyxjax":2,"nonce":"\\ud800"}\n',
        b"[" * 9000 + b"\n",
        b"[1]\n",
        b'{"cyxjax":1,"nonce":"n"}\n',
    ],
)
def test_another_program_on_the_port_is_named(greeting):
    with ports.listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.sendall(greeting)
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(GroupError, match=r"^127\.0\.0\.1:\d+ .*cyxjax.*pid \d+.*MASTER_PORT"):
            client.join(Topology(1, 2, master_port=port, timeout_ms=2000))


def test_a_server_that_does_not_greet_yet_is_tried_again_for_the_timeout(place, monkeypatch):
    """Where thousands come at once the kernel takes connections that nobody looks at for a while."""
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    meeting, real, knocks = place(1), socket.create_connection, []

    def create_connection(where, **options):
        knocks.append(where)
        return real(where if len(knocks) > 1 else deaf.getsockname(), **options)

    with ports.listen("127.0.0.1", 0) as deaf:
        with pytest.raises(GroupError, match=r"127\.0\.0\.1:\d+ .*HINT"):
            client.join(Topology(1, 2, master_port=deaf.getsockname()[1], timeout_ms=300))
        monkeypatch.setattr(client.socket, "create_connection", create_connection)
        assert meeting.join(0).coordinator == {"address": "x:1"}
    assert len(knocks) == 2


@pytest.mark.parametrize(
    ("address", "nproc", "token", "lines"),
    [("0.0.0.0", 1, "", 1), ("0.0.0.0", 1, "secret", 0), ("0.0.0.0", 2, "", 0), ("127.0.0.1", 1, "", 0)],
)
def test_rank_0_of_a_job_across_hosts_warns_once_without_a_token(capfd, address, nproc, token, lines):
    # What a rank started by hand, by srun or by mpirun does: no launcher is there to warn.
    with ports.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    topology = Topology(0, 2, master_addr=address, master_port=port, local_world_size=nproc, token=token)
    connect._coordinate(topology).end()
    assert capfd.readouterr().err.count("CYXJAX_TOKEN is not set: whoever reaches 0.0.0.0 can join") == lines


def test_all_are_told_why_no_group_forms_before_rank_0_ends(monkeypatch):
    # Rank 0 hears it first and ends, with the server in its process: rank 1 knocked there for a minute.
    sent, ending, end, send = [], threading.Event(), Coordinator.end, server.Peer.send

    def slow_send(self, message):
        if "abort" in message and sent:
            ending.wait(10)
        send(self, message)
        sent.extend(["abort"] if "abort" in message else [])

    monkeypatch.setattr(server.Peer, "send", slow_send)
    monkeypatch.setattr(Coordinator, "end", lambda self: (ending.set(), end(self)))
    with ports.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    rank_0, rank_1 = (
        Topology(rank, 2, master_port=port, token="secret", timeout_ms=20_000) for rank in range(2)
    )
    host = connect._coordinate(rank_0)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(connect._meet, rank_0, {"program": "train.py"}, host)
        assert until(lambda: 0 in host.ranks.here, 10)
        one = pool.submit(client.join, rank_1, {"program": "other.py"})
        for told in (zero, one):
            with pytest.raises(GroupError, match=r"program: train\.py .*rank 0; other\.py .*rank 1"):
                told.result(30)


def test_the_wait_for_a_missing_rank_stands_still_while_the_server_is_suspended(place, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0]))
    said: list[str] = []
    meeting = Rendezvous(Job(2, timeout_s=30.0), dict, place(1).server, said.append)
    meeting.here[0] = rendezvous.Joined(
        rendezvous.Hello(0, 2), SimpleNamespace(send=said.append, is_open=False)
    )
    for seconds in (0.5, 3600.0, 0.5):
        now[0] += seconds
        meeting.tick()
    assert said == []
    for _ in range(60):
        now[0] += 0.5
        meeting.tick()
    assert said[-1]["abort"].startswith("Timeout waiting for peers: rank 1 after 30 s; here: rank 0")
