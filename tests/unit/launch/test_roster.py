"""The roster of a group and its protocol: who may enter, who is awaited, which bytes are no message."""

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch.group import protocol
from cyxjax.launch.group.roster import Hello, Job, Roster, ranks_text


def hello(rank, **changes):
    values = {"world_size": 4, "run_id": "j", "host": "a", "pid": 10 + rank} | changes
    return Hello(rank, **values)


@pytest.fixture
def roster():
    roster = Roster(Job(4, "j", generation=1))
    roster.add(hello(0, generation=1))
    return roster


@pytest.mark.parametrize(
    ("newcomer", "said"),
    [
        (hello(1, generation=1, run_id="other"), "belongs to job 'j', rank 1 .* is of job 'other'"),
        (hello(1, generation=1, world_size=3), "ranks differ in WORLD_SIZE: 3 on rank 1; 4 on the others"),
        (hello(7, generation=1), "outside WORLD_SIZE=4"),
        (
            hello(0, generation=1, host="b", pid=99),
            r"RANK=0 is taken: rank 0 \(host a, pid 10\).*host b, pid 99",
        ),
    ],
)
def test_who_may_not_enter(roster, newcomer, said):
    import re

    assert re.search(said, roster.refusal(newcomer) or "")


def test_who_may(roster):
    assert roster.refusal(hello(1, generation=1)) is None


def test_the_awaited_are_named_with_what_is_known(roster):
    roster.add(hello(1, generation=1, host="b"))
    roster.remove(1)
    assert roster.awaited() == "ranks 2, 3 (never seen) and rank 1 (seen on host b, pid 11, then lost)"
    assert roster.here() == "rank 0 on a"


def test_facts_that_differ_are_named_with_both_values():
    roster = Roster(Job(3))
    for rank, version in enumerate(["1", "1", "2"]):
        roster.add(hello(rank, facts={"jax": version, "python": "3.11"}))
    assert (roster.differing_fact() or "").startswith(
        "ranks differ in jax: 1 on ranks 0, 1; 2 on rank 2. HINT"
    )


def test_ranks_are_written_in_runs():
    assert ranks_text([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7, 8"
    assert ranks_text([3]) == "rank 3"


@pytest.mark.parametrize(
    "data", [b"x" * (protocol.MAX_LINE + 100), b"not json\n", b"[1]\n", b"[" * 9000 + b"\n", b"\xff\n"]
)
def test_what_is_no_message_is_refused_in_bounded_memory(data):
    codec = protocol.Codec()
    with pytest.raises(protocol.BadMessage):
        read(codec, data)


def test_messages_may_arrive_in_pieces():
    codec = protocol.Codec()
    assert read(codec, b'{"a":1}\n{"b"') == [{"a": 1}]
    assert read(codec, b":2}\n") == [{"b": 2}]


def read(codec, data):
    """The messages that `data` completes."""
    codec.feed(data)
    return list(iter(codec.next, None))


def test_a_hello_of_the_wrong_shape_names_its_fields():
    with pytest.raises(ConfigError, match=r"rank\W+facts"):
        Hello.parse({"rank": "0", "world_size": 1, "run_id": "", "generation": 0, "host": "", "pid": 1})
