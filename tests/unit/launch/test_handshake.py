"""What unauthenticated bytes can do at a server: nothing beyond the connection they came on."""

import contextlib
import errno
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.errors import GroupError
from cyxjax.launch import output
from cyxjax.launch.group import client, ports, protocol, server
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.coordinator import Coordinator, Hosts
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.topology import Topology
from tests.support.hostile_peers import Flood, Impostor
from tests.support.waiting import until

TOKEN = "secret"
KILLED_THE_THREAD = b'{"nonce":"n","proof":"\\ud800"}\n'
SEEDS = [
    KILLED_THE_THREAD,
    b'{"nonce":"n","proof":"\xc3\xa9"}\n',
    b'{"nonce":"n","proof":null,"rank":0}\n',
    b'{"nonce":"n","proof":[["a"]],"facts":{"\\udfff":"\\ud800"}}\n',
    b"[" * 8000 + b"\n",
    b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"\n",
    b'{"nonce":"n","proof":NaN,"rank":Infinity,"pid":-Infinity}\n',
    b'{"nonce":"n","proof":"a","rank":1e999}\n',
    b'{"nonce":"n","proof":"a","rank":' + b"9" * 4200 + b"}\n",
    b'{"nonce":"n","proof":"a","rank":' + b"9" * 9000 + b"}\n",
    '{"nonce":"n","proof":"a"}\n'.encode("utf-16"),
    b"\xef\xbb\xbf" + b'{"nonce":"n","proof":"a"}\n',
    b"{}\n" * 4000,
    b"null\n",
    b'"proof"\n',
    b"\0" * 100,
    b"x" * 20_000,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\n\n\n",
]
HELLO = {"rank": 0, "world_size": 2, "run_id": "job", "generation": 0, "host": "h", "pid": 1, "facts": {}}
HOST = {"host": "h", "nproc": 1, "run_id": "job", "base_rank": -1, "world_size": 0}


def build(kind):
    """The first host of a job of two hosts or of two ranks, which does not serve yet; its log is `said`."""
    place = LocalRanks(1, 0, 2, "127.0.0.1", 0, "job", 20_000, TOKEN)
    said: list[str] = []
    coordinator = Coordinator(place, said.append, serves=False)
    coordinator.said, coordinator.kind = said, kind
    if kind == "ranks":
        coordinator.open_start(0, 2)
    else:
        coordinator.server.hosts = Hosts(coordinator, Size(2, 2), 0)
    return coordinator


@pytest.fixture(params=["ranks", "hosts"], ids=["Ranks", "Hosts"])
def idle(request):
    coordinator = build(request.param)
    yield coordinator
    coordinator.end()


@pytest.fixture
def live(idle):
    """As `idle`, but it serves; among hosts it is one itself."""
    own = idle.lead(Size(2, 2), 0) if idle.kind == "hosts" else idle.server.start()
    yield idle
    idle.end()
    own.close()


def port_of(live):
    return live.place.master_port


def knock(live):
    return socket.create_connection(("127.0.0.1", port_of(live)), timeout=10)


def introduce(connection, hello):
    """The channel of a client whose `hello` was sent."""
    channel = protocol.Channel(connection)
    client._introduce(channel, hello, client.Server("127.0.0.1", 0, TOKEN, 10.0, "a client", "the test"))
    return channel


def serves(live) -> bool:
    """Whether it still forms a group, or admits a host."""
    if live.kind == "hosts":
        with knock(live) as connection:
            call = introduce(connection, HOST).next()
        assert until(lambda: len(live.server.hosts.controller.hosts) == 1, 10)
        return (call["base_rank"], call["world_size"]) == (1, 2)
    place = {"master_port": port_of(live), "token": TOKEN, "run_id": "job", "timeout_ms": 15_000}
    with ThreadPoolExecutor(2) as pool:
        members = list(pool.map(lambda rank: client.join(Topology(rank, 2, **place), log=print), range(2)))
    for member in members:
        member.leave()
    return all(member.coordinator["served"] is False for member in members)


def mutated(rng: random.Random) -> bytes:
    """A seed with some of its bytes changed, doubled or cut out; now and then two joined."""
    data = bytearray(rng.choice(SEEDS) + (rng.choice(SEEDS) if rng.random() < 0.1 else b""))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(3)
        data[at : at + rng.randrange(8) * (kind > 0)] = rng.randbytes(rng.randrange(5)) * (kind < 2)
    return bytes(data)


def anything(depth: int = 4) -> st.SearchStrategy:
    text = st.text(st.characters(exclude_categories=()), max_size=20)  # halves of surrogate pairs too
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | text
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
    )


def pending(server):
    """(a connection of a client that has proved nothing, the client's end of it), read by the test itself."""
    ours, theirs = socket.socketpair()
    peer = server.add(ours, "10.0.0.9")
    peer.hear = partial(server._check_proof, peer)
    server._pending[peer] = None
    return peer, theirs


def test_half_a_surrogate_pair_ends_its_own_connection_only(live):
    with knock(live) as hostile:
        hostile.sendall(KILLED_THE_THREAD)
        while hostile.recv(4096):
            pass
    assert live.server.thread.is_alive()
    assert serves(live)


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.wide))])
def test_thousands_of_broken_inputs_raise_nothing(idle, number):
    rng, server = random.Random(number), idle.server
    for data in [*SEEDS, *(mutated(rng) for _ in range(number))]:
        peer, theirs = pending(server)
        with theirs:
            for start in range(0, len(data), protocol.MAX_LINE):
                if peer.is_open:
                    theirs.send(data[start : start + protocol.MAX_LINE])
                    server._read(peer)
            server.drop(peer)
    assert not server._pending
    assert not any("internal error" in line for line in idle.said)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(claims=st.dictionaries(st.sampled_from([*HELLO, "nproc", "first", "x"]), anything()))
def test_whatever_a_signed_hello_claims_it_is_let_in_or_refused(idle, claims):
    server, message = idle.server, {**(HELLO if idle.kind == "ranks" else HOST), **claims}
    peer, theirs = pending(server)
    with theirs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "keep_alive", lambda connection: None)  # sockets without a network have none
        channel = protocol.Channel(theirs)
        channel.send({"nonce": "n", "proof": protocol.proof(TOKEN, "client", peer.nonce, "n")})
        server._read(peer)
        assert protocol.is_proof(channel.next()["proof"], protocol.proof(TOKEN, "server", peer.nonce, "n"))
        channel.authenticate(protocol.session_key(TOKEN, peer.nonce, "n"), is_server=False)
        with contextlib.suppress(UnicodeEncodeError, OSError):
            channel.send(message)
            server._read(peer)
        assert peer not in server._pending
        server.drop(peer)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | anything().map(lambda value: json.dumps(value).encode() + b"\n"))
def test_lines_are_messages_that_can_be_written_again_or_bad(data):
    channel = protocol.Channel(None)
    with contextlib.suppress(ValueError):
        channel.feed(data)
        while (message := channel.pop()) is not None:
            assert repr(protocol.decode(protocol.encode(message)[:-1])) == repr(message)  # NaN is not NaN
            assert not protocol.is_proof(message.get("proof"), protocol.proof(TOKEN, "client", "n", "m"))
            assert output.printable(message).isprintable()


def test_a_host_that_cannot_be_reached_any_more_is_the_end_of_its_connection():
    def recv(size):
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # of the kernel's keep-alive

    assert protocol.Channel(SimpleNamespace(recv=recv)).next() is None


def test_a_line_without_end_is_refused_in_bounded_memory():
    channel = protocol.Channel(None)
    channel.feed(b"x" * protocol.MAX_LINE)
    with pytest.raises(ValueError, match="long"):
        channel.feed(b"x" * protocol.MAX_LINE)


@pytest.mark.parametrize("number", [500, pytest.param(3000, marks=pytest.mark.slow)])
def test_after_thousands_of_broken_connections_the_server_works(live, number):
    rng = random.Random(11)
    for i in range(number):
        with knock(live) as hostile:
            with contextlib.suppress(OSError):  # it may be turned away already
                hostile.sendall(mutated(rng))
            if i % 3 == 0:  # a reset instead of an end
                hostile.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert live.server.thread.is_alive()
    assert serves(live)
    assert len(live.said) < 12


def test_an_error_of_ours_ends_one_connection_and_is_told_once(live, monkeypatch):
    def broken(given, expected):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "is_proof", broken)
        for _ in range(5):
            with knock(live) as hostile:
                hostile.sendall(b"{}\n")
                while hostile.recv(4096):
                    pass
    assert sum("internal error" in line and "ZeroDivisionError" in line for line in live.said) == 1
    assert serves(live)


def test_a_hello_in_drips_has_one_deadline(live, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.6)
    began = time.monotonic()
    with knock(live) as hostile:
        hostile.settimeout(0.1)
        ended = False
        while not ended and time.monotonic() - began < 10:
            with contextlib.suppress(TimeoutError):
                ended = hostile.recv(4096) == b""
            if not ended:
                with contextlib.suppress(OSError):
                    hostile.send(b"{")
        assert ended  # each drip used to begin a new deadline


def test_slow_clients_on_all_places_do_not_keep_the_job_out(live):
    with contextlib.ExitStack() as stack:
        for _ in range(2 * server.MAX_PENDING):
            hostile = stack.enter_context(knock(live))
            with contextlib.suppress(OSError):
                hostile.send(b"{")
        assert serves(live)


def test_a_thousand_wrong_tokens_are_two_lines(live):
    for _ in range(1000):
        with knock(live) as hostile:
            hostile.sendall(b'{"nonce":"n","proof":"guess"}\n' * 20)
            while hostile.recv(4096):
                pass
    [refused] = [line for line in live.said if "wrong or missing job token" in line]
    assert refused.startswith("refused a connection from 127.0.0.1: ")
    assert TOKEN not in refused
    with knock(live) as connection:  # a peer of the job that is refused is still told of
        hello = HELLO if live.kind == "ranks" else HOST
        assert "belongs to job 'job'" in introduce(connection, hello | {"run_id": "x"}).next()["refused"]
    assert "belongs to job 'job'" in live.said[-1]
    assert len(live.said) == 2


def test_the_name_of_a_host_cannot_steer_a_terminal(capfd):
    live = build("ranks")
    live.server.start()
    hello = HELLO | {"host": "\x1b]0;owned\x07\r\nnode\u202e1", "rank": 5}
    with knock(live) as connection:
        answer = introduce(connection, hello).next()
    live.end()
    assert "outside WORLD_SIZE=2" in answer["refused"]
    for line in live.said:
        client.log(line)
        output.say(line)
    output.flush()
    said = capfd.readouterr().err
    assert "".join(said.splitlines()).isprintable()
    assert said.count(r"\x1b]0;owned\x07\r\nnode\u202e1") == 2


FORMED = {"formed": {"address": "127.0.0.1:1", "served": True}}
ANSWERS = {
    "no proof": lambda first: protocol.encode(FORMED),
    "a guess": lambda first: protocol.encode({"proof": "0" * 64}) + protocol.encode(FORMED),
    "the client's own proof": lambda first: (
        protocol.encode({"proof": first["proof"]}) + protocol.encode(FORMED)
    ),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_rank_tells_an_impostor_nothing_but_a_nonce_and_a_proof(answer):
    impostor = Impostor(answer)
    place = Topology(1, 2, master_port=impostor.port, token=TOKEN, run_id="job", timeout_ms=5000)
    with impostor.listener, pytest.raises(GroupError, match="CYXJAX_TOKEN"):
        client.join(place, {"config": "digest"})
    [sent] = impostor.received
    assert sent.count(b"\n") == 1
    assert json.loads(sent).keys() == {"nonce", "proof"}


@pytest.mark.parametrize("forge", ["other key", "replayed", "reordered", "reflected", "unsigned"])
def test_lines_that_are_not_the_next_of_the_other_end_are_not_read(forge):
    client_end, server_end = protocol.Channel(None), protocol.Channel(None)
    key = protocol.session_key(TOKEN, "s", "c")
    client_end.authenticate(key, is_server=False)
    server_end.authenticate(
        protocol.session_key(TOKEN, "s", "d") if forge == "other key" else key, is_server=True
    )
    first, second = server_end.encode({"n": 1}), server_end.encode({"n": 2})
    data = {
        "other key": first,
        "replayed": first + first,
        "reordered": second + first,
        "reflected": client_end.encode({"n": 1}),
        "unsigned": protocol.encode({"n": 1}),
    }[forge]
    client_end.feed(data)
    with pytest.raises(ValueError, match="authenticated"):
        assert (client_end.pop(), client_end.pop())[0] == {"n": 1}


@pytest.mark.parametrize(("places", "address"), [(512, "127.0.0.1"), (128, "127.0.0.2")])
def test_300_clients_that_come_back_do_not_keep_a_slow_host_out(monkeypatch, places, address):
    """From the flood's own address as long as there are places; from another one always."""
    monkeypatch.setattr(server, "MAX_PENDING", min(places, server.MAX_PENDING))
    live = build("ranks")
    live.server.start()
    flood = Flood(port_of(live), 300, "127.0.0.1")
    where, source = ("127.0.0.1", port_of(live)), (address, 0)
    send = protocol.Channel.send
    try:
        with socket.create_connection(where, timeout=5, source_address=source) as slow:
            monkeypatch.setattr(
                protocol.Channel,
                "send",
                lambda self, message: (self.socket is slow and time.sleep(0.7), send(self, message)),
            )
            introduce(slow, HELLO)
            assert until(lambda: list(live.ranks.here) == [0], 5)
    finally:
        flood.close()
        live.end()
