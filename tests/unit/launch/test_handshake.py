"""What unauthenticated bytes can do at a server: nothing beyond the connection they came on."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.errors import GroupError
from cyxjax.launch.group import client, handshake, ports, protocol
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.coordinator import Coordinator, GroupServer
from cyxjax.launch.group.handshake import BoundedLog, introduce
from cyxjax.launch.group.roster import Job
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


class Ranks:
    """A live server for two ranks. `serves` proves that it still forms a group."""

    def __init__(self):
        self.log: list[str] = []
        self.listener = ports.listen("127.0.0.1", 0)
        self.server = GroupServer(self.listener, TOKEN, self.log.append)
        self.server.open_start(Job(2, "job", timeout_s=20.0), lambda roster: {"address": "x:1"})
        self.server.start()
        self.thread, self.handshake = self.server.reactor.thread, self.server.handshake
        self.port = self.listener.getsockname()[1]

    def serves(self) -> bool:
        members: list[client.GroupConnection] = []

        def join(rank):
            place = Topology(rank, 2, master_port=self.port, token=TOKEN, run_id="job", timeout_ms=15_000)
            members.append(client.join(place, log=self.log.append))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for member in members:
            member.leave()
        return [member.coordinator for member in members] == [{"address": "x:1"}] * 2

    def close(self):
        self.server.close()
        self.listener.close()


class Hosts:
    """The live server of launchers that come and go. `serves` proves that it still admits a host."""

    def __init__(self):
        self.log: list[str] = []
        place = LocalRanks(1, 0, 1, "127.0.0.1", 0, "job", token=TOKEN)
        self.coordinator = Coordinator(place, self.log.append, serves=False)
        self.own = self.coordinator.lead(Size(2, 2), 0)
        self.server = self.coordinator.server
        self.thread, self.handshake = self.server.reactor.thread, self.server.handshake
        self.port = self.coordinator.place.master_port

    def serves(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            channel = protocol.Channel(connection)
            assert introduce(channel, HOST, TOKEN, 10)
            call = channel.next(10)
        assert until(lambda: len(self.server.hosts.controller.hosts) == 1, 10)
        return (call["base_rank"], call["world_size"]) == (1, 2)

    def close(self):
        self.coordinator.end()
        self.own.close()


@pytest.fixture(params=[Ranks, Hosts])
def live(request):
    made = request.param()
    yield made
    made.close()


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


def hear(live, data: bytes) -> None:
    """What the thread of `live` does with `data` of one connection, done here: it may raise nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        guest = handshake.PendingConnection(ours, "10.0.0.9")
        live.handshake._pending[guest] = None
        for start in range(0, len(data), protocol.MAX_LINE):
            if ours.fileno() != -1:  # not hung up yet
                theirs.send(data[start : start + protocol.MAX_LINE])
                live.handshake._read(guest)
        live.handshake.drop(guest)


@pytest.fixture
def pairs(monkeypatch):
    """Pairs of sockets without a network have no keep-alive."""
    monkeypatch.setattr(ports, "keep_alive", lambda connection: None)


def stopped(live):
    """`live` with its thread ended and its bookkeeping left, for calls from the test itself."""
    reactor = live.server.reactor
    reactor.close()
    reactor.add = reactor.remove = lambda *args: None
    return live


def test_half_a_surrogate_pair_ends_its_own_connection_only(live):
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as hostile:
        hostile.sendall(KILLED_THE_THREAD)
        while hostile.recv(4096):
            pass
    assert live.thread.is_alive()
    assert live.serves()


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.wide))])
def test_thousands_of_broken_inputs_raise_nothing(live, number):
    rng, live = random.Random(number), stopped(live)
    for data in SEEDS:
        hear(live, data)
    for _ in range(number):
        hear(live, mutated(rng))
    assert not live.handshake._pending


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    claims=st.dictionaries(st.sampled_from([*HELLO, "nproc", "first", "x"]), anything()), good=st.booleans()
)
def test_whatever_a_signed_hello_claims_it_is_let_in_or_refused(live, pairs, claims, good):
    live = stopped(live) if live.thread.is_alive() else live
    message = {**(HELLO if isinstance(live, Ranks) else HOST), **claims}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)  # as the server's own are
        guest = handshake.PendingConnection(ours, "10.0.0.9")
        live.handshake._pending[guest] = None
        channel, token = protocol.Channel(theirs), TOKEN if good else "guess"
        channel.send({"nonce": "n", "proof": protocol.proof(token, "client", guest.nonce, "n")})
        live.handshake._read(guest)
        answer = channel.next(1)
        if not good:
            assert answer is None or "refused" in answer
        else:
            assert protocol.is_proof(answer["proof"], protocol.proof(TOKEN, "server", guest.nonce, "n"))
            channel.codec.authenticate(protocol.session_key(TOKEN, guest.nonce, "n"), is_server=False)
            with contextlib.suppress(UnicodeEncodeError, OSError):
                channel.send(message)
                live.handshake._read(guest)
        live.handshake.drop(guest)
    assert guest not in live.handshake._pending


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | anything().map(lambda value: json.dumps(value).encode() + b"\n"))
def test_lines_are_messages_that_can_be_written_again_or_bad(data):
    codec = protocol.Codec()
    with contextlib.suppress(protocol.BadMessage):
        codec.feed(data)
        while (message := codec.next()) is not None:
            assert protocol.decode(protocol.encode(message)[:-1]) == message
            assert not protocol.is_proof(message.get("proof"), protocol.proof(TOKEN, "client", "n", "m"))
            assert protocol.printable(message).isprintable()


@pytest.mark.parametrize("number", [500, pytest.param(3000, marks=pytest.mark.slow)])
def test_after_thousands_of_broken_connections_the_server_works(live, number):
    rng = random.Random(11)
    for i in range(number):
        with socket.create_connection(("127.0.0.1", live.port), timeout=5) as hostile:
            with contextlib.suppress(OSError):  # it may be turned away already
                hostile.sendall(mutated(rng))
            if i % 3 == 0:  # a reset instead of an end
                hostile.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert live.thread.is_alive()
    assert live.serves()
    assert len(live.log) < 12


def test_an_error_of_ours_ends_one_connection_and_is_told_once(live, monkeypatch):
    def broken(given, expected):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "is_proof", broken)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", live.port), timeout=5) as hostile:
                hostile.sendall(b"{}\n")
                while hostile.recv(4096):
                    pass
    told = [line for line in live.log if "had an internal error and continues: ZeroDivisionError" in line]
    assert len(told) == 1
    assert live.serves()


def test_a_hello_in_drips_has_one_deadline(live, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.6)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as hostile:
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
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=5))
            for _ in range(2 * handshake.MAX_PENDING)
        ]
        for hostile in clients:
            with contextlib.suppress(OSError):
                hostile.send(b"{")
        assert live.serves()


def test_connections_of_the_most_crowded_address_are_dropped_first():
    listener = ports.listen("127.0.0.1", 0)
    there = handshake.Handshake(listener, TOKEN, lambda guest, hello: None, print)
    removed = []
    there._reactor = type("R", (), {"remove": lambda self, source: removed.append(source)})()
    pairs = [socket.socketpair() for _ in range(4)]
    addresses = ["10.0.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.2"]
    pending = [handshake.PendingConnection(ours, at) for (ours, _), at in zip(pairs, addresses, strict=True)]
    there._pending = dict.fromkeys(pending)
    crowd = pending[1]
    there._drop_one_above(3)
    there._drop_one_above(3)
    assert removed == [crowd.socket]
    for pair in [*pairs, (listener,)]:
        for end in pair:
            end.close()


def test_a_thousand_wrong_tokens_are_two_lines(live):
    for _ in range(1000):
        with socket.create_connection(("127.0.0.1", live.port), timeout=5) as hostile:
            hostile.sendall(b'{"nonce":"n","proof":"guess"}\n' * 20)
            while hostile.recv(4096):
                pass
    live.close()
    refused = [line for line in live.log if "wrong or missing job token" in line]
    assert refused == [
        "refused a connection from 127.0.0.1: wrong or missing job token",
        "refused a connection from 127.0.0.1: wrong or missing job token "
        "(998 more refused since the last such line)",
    ]


def test_held_lines_are_summed_up_once_an_interval():
    said: list[str] = []
    log = BoundedLog(said.append)
    for number in range(5):
        log.say(f"line {number}")
    log.tick(time.monotonic())
    assert said == ["line 0"]
    log.tick(time.monotonic() + handshake.LINE_EVERY_S)
    log.tick(time.monotonic() + 3 * handshake.LINE_EVERY_S)
    assert said == ["line 0", "line 4 (3 more refused since the last such line)"]


def test_the_name_of_a_host_cannot_steer_a_terminal():
    meeting = Ranks()
    hello = HELLO | {"host": "\x1b]0;owned\x07\r\nnode\u202e1", "rank": 5}
    try:
        with socket.create_connection(("127.0.0.1", meeting.port), timeout=5) as connection:
            channel = protocol.Channel(connection)
            assert introduce(channel, hello, TOKEN, 5)
            answer = channel.next(5)
    finally:
        meeting.close()
    assert "outside WORLD_SIZE=2" in answer["refused"]
    said = "".join(meeting.log) + answer["refused"]
    assert said.isprintable()
    assert r"\x1b]0;owned\x07\r\nnode\u202e1" in said


def test_a_meeting_place_that_answers_nonsense_is_told_in_one_line():
    for greeting in (b'{"cyxjax":2,"nonce":"\\ud800"}\n', b'{"cyxjax":2,"nonce":7}\n', b"[" * 9000 + b"\n"):
        with ports.listen("127.0.0.1", 0) as listener:

            def answer(listener=listener, greeting=greeting):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(greeting)
                    connection.recv(100)

            thread = threading.Thread(target=answer)
            thread.start()
            place = Topology(1, 2, master_port=listener.getsockname()[1], timeout_ms=2000)
            with pytest.raises(GroupError, match=r"^127\.0\.0\.1:\d+ .*cyxjax.*MASTER_PORT"):
                client.join(place)
            thread.join()


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
    client_end, server_end = protocol.Codec(), protocol.Codec()
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
    with pytest.raises(protocol.BadMessage):
        assert (client_end.next(), client_end.next())[0] == {"n": 1}


@pytest.mark.parametrize(("places", "address"), [(512, "127.0.0.1"), (128, "127.0.0.2")])
def test_300_clients_that_come_back_do_not_keep_a_slow_host_out(monkeypatch, places, address):
    """From the flood's own address as long as there are places; from another one always."""
    monkeypatch.setattr(handshake, "MAX_PENDING", min(places, handshake.MAX_PENDING))
    live = Ranks()
    flood = Flood(live.port, 300, "127.0.0.1")
    source = (address, 0)
    try:
        with socket.create_connection(("127.0.0.1", live.port), timeout=5, source_address=source) as slow:
            channel = protocol.Channel(slow)
            send = channel.send
            channel.send = lambda message: (time.sleep(0.7), send(message))
            assert introduce(channel, HELLO, TOKEN, 5)
            assert until(lambda: list(live.server.ranks.roster.present) == [0], 5)
    finally:
        flood.close()
        live.close()
