"""Unauthenticated bytes affect only their own connection to the server."""

import contextlib
import errno
import json
import random
import socket
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.errors import GroupError
from cyxjax.launch import output
from cyxjax.launch.group import client, protocol, server
from cyxjax.launch.group.controller import Size
from cyxjax.launch.topology import Topology
from tests.support.meeting import RANK, TOKEN, Meeting, flood, impostor
from tests.support.waiting import until

SEEDS = [
    b'{"nonce":"n","proof":"\\ud800"}\n',  # half a surrogate pair ended the thread of all ranks
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


def test_a_message_of_characters_that_take_many_bytes_arrives():
    # A message of an error has up to 2,000 characters; an escape of each would be too long a line.
    message = {"error": "\N{FIRE}" * 1999 + "\udc80"}  # and half a pair, as of a name that is not UTF-8
    channel = protocol.Channel(Mock())
    line = channel.encode(message)
    for start in range(0, len(line), 1448):
        channel.feed(line[start : start + 1448])
    assert channel.pop() == message


@pytest.fixture(params=[None, Size(2, 2)], ids=["Ranks", "Hosts"])
def live(request):
    """The first host of a job of two ranks, or of two hosts."""
    with contextlib.closing(Meeting(2, request.param)) as meeting:
        yield meeting


def serves(live) -> bool:
    """Whether the server still forms a group, or admits a host."""
    if live.server.hosts is not None:
        call = live.introduce().next()
        return (call["base_rank"], call["world_size"]) == (1, 2)
    return all(member.coordinator["served"] is False for member in live.join_all(0, 1))


def mutated(rng: random.Random) -> bytes:
    """A seed with some bytes changed, doubled or removed; sometimes two seeds joined."""
    data = bytearray(rng.choice(SEEDS) + (rng.choice(SEEDS) if rng.random() < 0.1 else b""))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(3)
        data[at : at + rng.randrange(8) * (kind > 0)] = rng.randbytes(rng.randrange(5)) * (kind < 2)
    return bytes(data)


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.wide))])
def test_after_thousands_of_broken_connections_the_server_works(live, number):
    rng = random.Random(number)
    for i, data in enumerate([*SEEDS, *(mutated(rng) for _ in range(number))]):
        with live.knock() as hostile:
            with contextlib.suppress(OSError):  # it may already be refused
                hostile.sendall(data)
            if i % 3 == 0:  # a reset instead of an end
                hostile.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert serves(live)
    assert len(live.log) < 12
    assert not any("internal error" in line for line in live.log)


def anything(depth: int = 4) -> st.SearchStrategy:
    text = st.text(st.characters(exclude_categories=()), max_size=20)  # halves of surrogate pairs too
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | text
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(claims=st.dictionaries(st.sampled_from([*RANK, "nproc", "first", "x"]), anything()))
def test_whatever_a_signed_hello_claims_it_is_let_in_or_refused(live, claims):
    live.introduce(**claims).close()
    with live.knock() as after:
        assert after.recv(4096)  # it greets the next one


def test_a_host_that_cannot_be_reached_any_more_is_the_end_of_its_connection():
    # of the kernel's keep-alive
    recv = Mock(side_effect=TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
    assert protocol.Channel(SimpleNamespace(recv=recv)).next() is None


def test_a_line_without_end_is_refused_in_bounded_memory():
    channel = protocol.Channel(None)
    channel.feed(b"x" * protocol.MAX_LINE)
    with pytest.raises(ValueError, match="long"):
        channel.feed(b"x" * protocol.MAX_LINE)


def test_an_error_of_ours_ends_one_connection_and_is_told_once(live, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "is_proof", Mock(side_effect=ZeroDivisionError))
        for _ in range(5):
            with live.knock() as hostile:
                hostile.sendall(b"{}\n")
                while hostile.recv(4096):
                    pass
    assert sum("internal error" in line and "ZeroDivisionError" in line for line in live.log) == 1
    assert serves(live)


def test_a_hello_in_drips_has_one_deadline(live, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.6)
    with live.knock() as hostile:
        hostile.setblocking(False)

        def is_dropped():
            try:
                return hostile.send(b"{") == 0 or hostile.recv(4096) == b""
            except OSError as error:
                return not isinstance(error, BlockingIOError)

        assert until(is_dropped, 10)  # each byte used to reset the deadline


def test_many_wrong_tokens_are_two_lines(live):
    for _ in range(200):
        with live.knock() as hostile:
            hostile.sendall(b'{"nonce":"n","proof":"guess"}\n' * 20)
            while hostile.recv(4096):
                pass
    [refused] = [line for line in live.log if "wrong or missing job token" in line]
    assert refused.startswith("refused a connection from 127.0.0.1: ")
    assert TOKEN not in refused
    # a refused peer of the job is still logged
    assert "belongs to job 'job'" in live.introduce(run_id="x").next()["refused"]
    assert "belongs to job 'job'" in live.log[-1]
    assert len(live.log) == 2


def test_the_name_of_a_host_cannot_steer_a_terminal(capfd):
    with contextlib.closing(Meeting()) as live:
        answer = live.introduce(host="\x1b]0;owned\x07\r\nnode\u202e1", rank=5).next()
    assert "outside WORLD_SIZE=2" in answer["refused"]
    for line in live.log:
        output.log(line)
        output.say(line)
    output.flush()
    printed = capfd.readouterr().err
    assert "".join(printed.splitlines()).isprintable()
    assert printed.count(r"\x1b]0;owned\x07\r\nnode\u202e1") == 2


GREETING = protocol.encode({"cyxjax": protocol.PROTOCOL, "nonce": "5" * 32})
FORMED = protocol.encode({"formed": {"address": "127.0.0.1:1", "served": True}})
STRANGER = r"^127\.0\.0\.1:\d+ .*cyxjax.*MASTER_PORT"
IMPOSTORS = {
    "ssh": (b"SSH-2.0-OpenSSH\r\n", None, STRANGER),
    "half a pair": (b'{"cyxjax":2,"nonce":"\\ud800"}\n', None, STRANGER),
    "nested": (b"[" * 9000 + b"\n", None, STRANGER),
    "list": (b"[1]\n", None, STRANGER),
    "another version": (b'{"cyxjax":1,"nonce":"n"}\n', None, STRANGER),
    "no proof": (GREETING, lambda first: FORMED, "CYXJAX_TOKEN"),
    "a guess": (GREETING, lambda first: protocol.encode({"proof": "0" * 64}) + FORMED, "CYXJAX_TOKEN"),
    "no text": (GREETING, lambda first: b'{"proof":"\\ud800"}\n', "CYXJAX_TOKEN"),
    "the client's own proof": (
        GREETING,
        lambda first: protocol.encode({"proof": first["proof"]}) + FORMED,
        "CYXJAX_TOKEN",
    ),
}


@pytest.mark.parametrize(("greeting", "answer", "named"), IMPOSTORS.values(), ids=IMPOSTORS)
def test_a_rank_tells_an_impostor_nothing_but_a_nonce_and_a_proof(greeting, answer, named):
    with impostor(greeting, answer) as (port, received), pytest.raises(GroupError, match=named):
        client.join(Topology(1, 2, master_port=port, token=TOKEN, run_id="job", timeout_ms=5000))
    assert [json.loads(sent).keys() for sent in received] == [{"nonce", "proof"}] * (answer is not None)


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


class Slow(protocol.Channel):
    """A client that sends each line slowly."""

    def send(self, message):
        time.sleep(0.7)
        super().send(message)


@pytest.mark.parametrize(("places", "address"), [(512, "127.0.0.1"), (128, "127.0.0.2")])
def test_300_clients_that_come_back_do_not_keep_a_slow_host_out(monkeypatch, places, address):
    """From the address of the flood while there are free places; from another address always."""
    monkeypatch.setattr(server, "MAX_PENDING", min(places, server.MAX_PENDING))
    with contextlib.closing(Meeting()) as live, flood(live.port, 300, "127.0.0.1"):
        live.introduce(live.knock(address), Slow)
        assert until(lambda: list(live.first.ranks.here) == [0], 5)
