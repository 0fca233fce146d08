"""Ranks as threads around a real server: forming, refusing, losing, and unauthenticated clients."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch import connect
from cyxjax.launch.group import client, handshake, ports, protocol
from cyxjax.launch.group.client import GroupConnection
from cyxjax.launch.group.coordinator import GroupServer
from cyxjax.launch.group.roster import Job
from cyxjax.launch.topology import Topology


class Place:
    """A meeting place with its log, and topologies that lead to it."""

    def __init__(self, world_size, timeout_s=10.0, **job):
        self.log: list[str] = []
        self.members: list[GroupConnection] = []
        self.listener = ports.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.job = Job(world_size, "job", timeout_s=timeout_s, **job)
        self.server = GroupServer(self.listener, "secret", self.log.append)
        self.ranks = self.server.open_start(self.job, lambda roster: {"address": "x:1"})
        self.server.start()

    def join(self, rank, facts=None, **changes):
        place = {"world_size": self.job.world_size, "token": "secret", "run_id": "job", "timeout_ms": 8000}
        topology = Topology(rank, master_port=self.port, hosted=True, **(place | changes))
        member = client.join(topology, facts, log=self.log.append)
        self.members.append(member)
        return member

    def close(self):
        for member in self.members:
            member.leave()
        self.server.close()
        self.listener.close()

    def join_all(self, calls):
        """The outcome of each call: a GroupConnection or the GroupError it raised."""

        def outcome(call):
            try:
                return self.join(**call)
            except GroupError as error:
                return str(error)

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(outcome, calls))


@pytest.fixture
def place():
    with contextlib.ExitStack() as stack:

        def build(world_size, **job):
            place = Place(world_size, **job)
            stack.callback(place.close)
            return place

        yield build


def test_a_group_forms_and_learns_the_coordinator(place):
    members = place(3).join_all([{"rank": rank} for rank in range(3)])
    assert [member.coordinator for member in members] == [{"address": "x:1"}] * 3
    assert {member.own_address for member in members} == {"127.0.0.1"}


def test_more_ranks_than_pending_connections_all_meet_at_once(place):
    ranks = handshake.MAX_PENDING + 40
    members = place(ranks, timeout_s=60.0).join_all([{"rank": n, "timeout_ms": 60_000} for n in range(ranks)])
    assert [type(member) for member in members] == [GroupConnection] * ranks


def test_a_late_rank_is_waited_for(place):
    meeting = place(2)
    late = threading.Timer(1.0, lambda: meeting.join(1))
    late.start()
    assert meeting.join(0).coordinator
    late.join()


def test_a_missing_rank_is_named_within_the_timeout(place):
    meeting, began = place(3, timeout_s=1.0), time.monotonic()
    said = meeting.join_all([{"rank": 0}])[0]
    assert "Timeout waiting for peers: ranks 1, 2 (never seen)" in said
    assert "here: rank 0 on" in said
    assert time.monotonic() - began < 4


def test_different_world_sizes_end_the_formation_at_once(place):
    meeting, began = place(3), time.monotonic()
    first = threading.Thread(target=lambda: outcomes.extend(meeting.join_all([{"rank": 0}])))
    outcomes: list = []
    first.start()
    while not meeting.ranks.roster.present:
        time.sleep(0.01)
    refused = meeting.join_all([{"rank": 1, "world_size": 2}])[0]
    first.join()
    assert "ranks differ in WORLD_SIZE" in refused
    assert "3 on rank 0; 2 on rank 1" in outcomes[0]
    assert time.monotonic() - began < 4


def test_a_rank_of_another_world_size_that_comes_first_is_remembered(place):
    meeting = place(3)
    assert "ranks differ in WORLD_SIZE" in meeting.join_all([{"rank": 1, "world_size": 2}])[0]
    assert "3 on rank 0; 2 on rank 1" in meeting.join_all([{"rank": 0}])[0]


def test_a_service_that_cannot_start_is_told_to_all(place):
    meeting = place(2)

    def fail(roster):
        raise RuntimeError("no port")

    meeting.ranks._open = fail
    assert all("could not start: no port" in said for said in meeting.join_all([{"rank": 0}, {"rank": 1}]))


def test_different_configurations_are_refused_on_every_rank(place):
    calls = [{"rank": 0, "facts": {"config": "aa"}}, {"rank": 1, "facts": {"config": "bb"}}]
    for said in place(2).join_all(calls):
        assert "ranks differ in config: aa on rank 0; bb on rank 1" in said


def test_a_second_rank_0_in_a_running_job_is_refused_and_the_job_untouched(place):
    meeting = place(2)
    members = meeting.join_all([{"rank": 0}, {"rank": 1}])
    lost: list[str] = []
    for member in members:
        member.watch(lost.append)
    assert "RANK=0 is taken" in meeting.join_all([{"rank": 0}])[0]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda member: member.wait_until_all_are_done(5), members))
    assert lost == []


def test_a_wrong_token_is_refused_without_being_shown(place):
    meeting = place(2)
    said = meeting.join_all([{"rank": 0, "token": "guess"}])[0]
    assert "wrong or missing job token" in said
    assert "secret" not in said + "".join(meeting.log)


def test_a_death_is_told_to_the_others_by_rank_and_cause(place):
    meeting = place(3)
    members = meeting.join_all([{"rank": rank} for rank in range(3)])
    lost, heard = [], threading.Semaphore(0)
    for member in members[:2]:
        member.watch(lambda why: (lost.append(why), heard.release()))
    members[2].fail("ValueError: boom (train.py:8)")
    for _ in range(2):
        assert heard.acquire(timeout=5)
    assert all(why.startswith("lost rank 2 (host ") and "boom (train.py:8)" in why for why in lost)


def test_a_goodbye_is_no_death(place):
    meeting = place(2)
    members = meeting.join_all([{"rank": 0}, {"rank": 1}])
    lost: list[str] = []
    members[0].watch(lost.append)
    members[1].leave()
    meeting.server.wait_until_empty(0.3)
    assert lost == []


def test_a_meeting_place_whose_thread_was_the_faster_one_closes(place):
    server = place(1).server
    server.reactor.closing = True  # what close() sets first, and the thread may see before close() goes on
    server.reactor.thread.join(timeout=5)
    server.close()
    assert not server.reactor.thread.is_alive()


def test_a_thousand_unauthenticated_clients_do_no_harm(place):
    meeting = place(2)
    with contextlib.ExitStack() as stack:
        for i in range(1000):
            other = stack.enter_context(socket.create_connection(("127.0.0.1", meeting.port), timeout=5))
            if i % 3 == 0:
                with contextlib.suppress(OSError):  # may be turned away already
                    other.sendall(b"GET / HTTP/1.0\r\n\r\n" if i % 2 else b"\0" * 100)
        members = meeting.join_all([{"rank": 0}, {"rank": 1}])
    assert all(member.coordinator for member in members)


def test_a_client_that_sends_nothing_is_dropped(place, monkeypatch):
    monkeypatch.setattr("cyxjax.launch.group.handshake.HANDSHAKE_S", 0.2)
    meeting = place(2)
    with socket.create_connection(("127.0.0.1", meeting.port), timeout=5) as other:
        assert b"nonce" in other.recv(1000)
        assert other.recv(1000) == b""


def test_a_newer_start_waits_for_the_meeting_place_to_catch_up(place, monkeypatch):
    monkeypatch.setattr("cyxjax.launch.group.client.PATIENCE_S", 0.5)
    meeting = place(1, timeout_s=1.0)
    began = time.monotonic()
    said = meeting.join_all([{"rank": 0, "restart_count": 1, "timeout_ms": 500}])[0]
    assert "did not admit rank 0" in said
    assert time.monotonic() - began < 9


def test_a_rank_that_comes_back_to_a_broken_group_waits_for_the_restart(place, monkeypatch):
    monkeypatch.setattr("cyxjax.launch.group.client.PATIENCE_S", 0.5)
    meeting = place(2)
    members = meeting.join_all([{"rank": 0}, {"rank": 1}])
    members[1].fail("killed")
    members[1].leave()
    time.sleep(0.2)
    assert "did not admit rank 1" in meeting.join_all([{"rank": 1, "timeout_ms": 300}])[0]  # not: taken


def test_nobody_there_is_a_refused_connection():
    topology = Topology(1, 2, master_port=ports_free(), timeout_ms=300)
    with pytest.raises(GroupError, match=rf"refused .*127\.0\.0\.1:{topology.master_port} .*rank 1"):
        client.join(topology)


def test_a_name_that_does_not_resolve():
    topology = Topology(1, 2, master_addr="no-such-host.invalid", timeout_ms=300)
    with pytest.raises(GroupError, match=r"MASTER_ADDR='no-such-host\.invalid'"):
        client.join(topology)


def test_a_loopback_name_in_a_job_of_several_hosts(monkeypatch):
    monkeypatch.setattr(ports, "resolve", lambda host, port: [(socket.AF_INET, ("127.0.1.1", port))])
    topology = Topology(1, 4, local_world_size=2, master_addr="node1", timeout_ms=300)
    with pytest.raises(GroupError, match=r"MASTER_ADDR=node1 .*127\.0\.1\.1.* 2 .*4 ranks"):
        client.join(topology)


def test_another_program_on_the_port_is_named():
    with ports.listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(GroupError, match=r"^127\.0\.0\.1:\d+ .*cyxjax.*MASTER_PORT"):
            client.join(Topology(1, 2, master_port=port, timeout_ms=2000))


def test_a_server_that_greets_late_is_waited_for(place, monkeypatch):
    """Where thousands come at once the kernel takes connections that nobody looks at for a while."""
    meeting = place(1)
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    real, knocks = client._connect_any, []

    def connect_any(server):
        knocks.append(server.port)
        return real(server) if len(knocks) > 1 else socket.create_connection(deaf.getsockname())

    with ports.listen("127.0.0.1", 0) as deaf:
        monkeypatch.setattr(client, "_connect_any", connect_any)
        assert meeting.join(0).coordinator == {"address": "x:1"}
    assert len(knocks) == 2
    assert meeting.log == [f"rank 0: no greeting from 127.0.0.1:{meeting.port} yet; trying again"]


def test_a_program_that_never_says_a_word_is_named_in_the_end(monkeypatch):
    monkeypatch.setattr(client, "PATIENCE_S", 0.1)
    with ports.listen("127.0.0.1", 0) as deaf:
        topology = Topology(1, 2, master_port=deaf.getsockname()[1], timeout_ms=300)
        with pytest.raises(GroupError, match=r"^127\.0\.0\.1:\d+ .*cyxjax.*pid \d+"):
            client.join(topology, log=lambda line: None)


def test_only_the_first_loss_is_told(place):
    """Those that die of it are as many as there are ranks: each told to all would be a million lines."""
    meeting = place(3)
    members = meeting.join_all([{"rank": rank} for rank in range(3)])
    for gone in (0, 1):
        members[gone]._channel.socket.shutdown(socket.SHUT_RDWR)
    while len(meeting.ranks.peers) > 1:
        time.sleep(0.01)
    members[2]._channel.socket.shutdown(socket.SHUT_WR)
    meeting.server.wait_until_empty(10)
    told = b""
    while data := members[2]._channel.socket.recv(4096):
        told += data
    assert told.count(b'"lost"') == 1


def ports_free() -> int:
    """A port nobody listens on."""
    with ports.listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def test_versions_name_what_must_fit_together():
    assert {"python", "jax", "jaxlib"} <= set(client.versions())
    assert protocol.PROTOCOL == 2


@pytest.mark.parametrize(
    ("address", "nproc", "token", "lines"),
    [("0.0.0.0", 1, "", 1), ("0.0.0.0", 1, "secret", 0), ("0.0.0.0", 2, "", 0), ("127.0.0.1", 1, "", 0)],
)
def test_rank_0_of_a_job_across_hosts_warns_once_without_a_token(capfd, address, nproc, token, lines):
    # What a rank started by hand, by srun or by mpirun does: no launcher is there to warn.
    topology = Topology(
        0, 2, master_addr=address, master_port=ports_free(), local_world_size=nproc, token=token
    )
    connect._coordinate(topology).end()
    assert capfd.readouterr().err.count("CYXJAX_TOKEN is not set: whoever reaches 0.0.0.0 can join") == lines
