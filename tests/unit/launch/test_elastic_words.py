"""What hosts of another version, or without a token anybody, can say: at worst that one is left out."""

import contextlib
import socket
import time

import pytest

from cyxjax.launch.elastic.group_start import GroupStart, end_message
from cyxjax.launch.elastic.registry import Registry
from cyxjax.launch.elastic.server import Agent, HostServer
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group import protocol
from cyxjax.launch.group.handshake import introduce
from cyxjax.launch.local_ranks import LocalRanks

AGENT = {"host": "h", "nproc": 1, "run_id": "job", "first": True}
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


@pytest.mark.parametrize("message", NO_ENDS)
def test_what_is_no_end_is_refused_before_anything_is_kept(message):
    agent = Agent(protocol.Channel(socket.socket()), "h", 1, True)
    start = GroupStart(0, [agent])
    with contextlib.closing(agent.connection), pytest.raises(ValueError, match=r"no end|an error record"):
        start.note_end(agent, message)
    assert start.running == [agent]


def test_the_end_that_a_host_tells_is_kept_and_cannot_steer_a_terminal():
    record = ErrorRecord(1, "Err\x1b[31m", "boom\n  rank 0: here\x07", host="n\x1b1", exit_code=7, step=4)
    agent = Agent(protocol.Channel(socket.socket()), "h", 1, True)
    start = GroupStart(0, [agent])
    with contextlib.closing(agent.connection):
        start.note_end(agent, protocol.decode(protocol.encode(end_message(0, "failed", 4, [record]))[:-1]))
    kept = start.failure
    assert kept is not None
    assert (kept.rank, kept.exit_code, kept.step, start.step) == (1, 7, 4, 4)
    assert (kept.type, kept.host) == ("Err\\x1b[31m", "n\\x1b1")
    assert kept.message == "boom\n  rank 0: here\\x07"


def test_a_host_comes_once_whatever_it_says():
    said: list = []
    server = HostServer(LocalRanks(1, 0, 2, "127.0.0.1", 0, "job"), said.append, print)
    server.open()
    try:
        with socket.create_connection(("127.0.0.1", server.place.master_port), timeout=10) as connection:
            channel = protocol.Channel(connection)
            assert introduce(channel, AGENT, "", 10)
            for _ in range(3):
                channel.send({"came": True})
        end = time.monotonic() + 10
        while (not said or said[-1][1] is not None) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        server.close()
    assert [message for _, message in said] == [{"came": True}, {}, {}, {}, None]


def test_a_host_that_talks_nonsense_is_left_out_and_the_registry_goes_on():
    log: list[str] = []
    place = LocalRanks(1, 0, 2, "127.0.0.1", 0, "job", token="secret")
    registry = Registry(place, 1, 1, 0, log.append).start()
    try:
        with socket.create_connection(("127.0.0.1", registry.place.master_port), timeout=10) as connection:
            channel = protocol.Channel(connection)
            assert introduce(channel, AGENT, "secret", 10)
            call = channel.next(20)
            assert call is not None
            channel.send({"ended": call["start"], "how": 7})
            while channel.next(20) is not None:  # it is told to end, then hung up on
                pass
        end = time.monotonic() + 10
        while not any("is left out" in line for line in log) and time.monotonic() < end:
            time.sleep(0.02)
        assert any("host h is left out: no end of a start: 7 at -1" in line for line in log)
        assert registry._caller.is_alive()
    finally:
        registry.close()
