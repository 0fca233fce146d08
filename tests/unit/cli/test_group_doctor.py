"""`cyxjax doctor` in a group: one row with one remedy per problem; each test creates one problem."""

import socket

import pytest

from cyxjax.cli import group_checks, group_doctor
from cyxjax.cli.group_checks import judge, others_files, own_file, wires
from cyxjax.cli.group_doctor import dial, look_around, neighbours, read_run
from cyxjax.core import replica
from cyxjax.data.splits import Splits
from cyxjax.train import experiment
from tests.support.wrapped import alone

CONTENT = {"samples": 10, "records": {"3": [["int", "7"]]}}
NOTHING = {"names": [], "ports": [], "folder": [], "sharing": []}
CLOCKS = [(100.0, 100.1)] * 2


def rank(number, **other):
    """What rank `number` of two, on two hosts, says where nothing is wrong."""
    return {
        "host": "ab"[number],
        "address": f"10.0.0.{1 + number}",
        "port": 4000,
        "software": {"python": "3.11", "optax": "0.2.6"},
        "memory_bytes": 8e9,
        "disk_bytes": 9e9,
        "devices": {"the number of devices": "4"},
        "config": {"epochs": "3"},
        "data": {"training data": CONTENT},
        "problem": "",
    } | other


def test_nothing_is_wrong():
    topics = "group names ports clocks versions config data devices memory disk folder"
    rows = [(check.level, check.topic) for check in judge([rank(0), rank(1)], [NOTHING] * 2, CLOCKS)]
    assert rows == [("ok", topic) for topic in topics.split()]


@pytest.mark.parametrize(
    ("topic", "level", "fault", "words"),
    [
        (
            "versions",
            "FAIL",
            {"software": {"python": "3.11", "optax": "0.3"}},
            "0.2.6 on rank 0; 0.3 on rank 1",
        ),
        ("versions", "FAIL", {"software": {"python": "3.11"}}, "optax: 0.2.6 on rank 0; (none) on rank 1"),
        ("config", "FAIL", {"config": {"epochs": "4"}}, "epochs: 3 on rank 0; 4 on rank 1"),
        (
            "config",
            "FAIL",
            {"problem": "x.yaml: no such file. HINT: name one."},
            "on rank 1: x.yaml: no such file",
        ),
        ("data", "FAIL", {"data": {"training data": CONTENT | {"samples": 9}}}, "10 on rank 0, 9 on rank 1"),
        ("devices", "warn", {"devices": {"the number of devices": "2"}}, "4 on rank 0; 2 on rank 1"),
        ("memory", "warn", {"memory_bytes": 5e8}, "0.5 GB of memory free, on rank 1 (b)"),
        ("disk", "warn", {"disk_bytes": 1e8}, "0.1 GB of disk free, on rank 1 (b)"),
    ],
)
def test_a_rank_that_differs_is_one_row_with_one_remedy(topic, level, fault, words):
    rows = judge([rank(0), rank(1, **fault)], [NOTHING] * 2, CLOCKS)
    found = [check for check in rows if check.level != "ok"]
    assert [(row.topic, row.level, row.found.count("HINT:")) for row in found] == [(topic, level, 1)]
    assert words in found[0].found


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        ({"names": ["a"]}, [("warn", "names", "a")]),
        ({"ports": ["a", "b"]}, [("FAIL", "ports", "a"), ("FAIL", "ports", "b")]),
        ({"sharing": ["a", "b"]}, [("warn", "folder", "a")]),
        ({"folder": ["a"], "sharing": ["b"]}, [("FAIL", "folder", "a")]),
    ],
)
def test_what_a_rank_found_is_a_row(found, rows):
    seen = judge([rank(0), rank(1)], [NOTHING, NOTHING | found], CLOCKS)
    assert [(check.level, check.topic, check.found) for check in seen if check.level != "ok"] == rows


@pytest.mark.parametrize(
    ("error", "addresses", "topic", "words"),
    [
        ("", ["10.0.0.1"], None, ""),
        ("", ["127.0.1.1"], "names", "on rank 1 a resolves to 127.0.1.1, not to 10.0.0.1"),
        ("", [], "names", "on rank 1 a resolves to nothing"),
        ("timed out", ["10.0.0.1"], "ports", "rank 1 (b) cannot reach rank 0 at 10.0.0.1:4000: timed out"),
    ],
)
def test_a_fault_on_the_way_to_another_rank_is_told(monkeypatch, error, addresses, topic, words):
    monkeypatch.setattr(group_doctor, "dial", lambda address, port: error)
    monkeypatch.setattr(group_doctor, "_addresses", lambda host: addresses)
    found = {name: texts for name, texts in look_around(1, [rank(0), rank(1)]).items() if texts}
    assert [*found] == [topic] * bool(topic)
    assert all(words in text for (text,) in found.values())


@pytest.mark.parametrize(
    ("began_s", "ended_s", "words"),
    [
        (101.0, 101.1, ""),  # from 0.9 to 1.1 s ahead: it may be right
        (60.0, 99.5, ""),  # it came early, or its clock is behind
        (101.2, 101.3, "rank 1 is at least 1.1 s ahead of rank 0's"),
        (10.0, 10.5, "rank 1 is at least 89.5 s behind rank 0's"),
    ],
)
def test_a_clock_is_wrong_where_an_exchange_ends_before_it_began_elsewhere(began_s, ended_s, words):
    clocks = [CLOCKS[0], (began_s, ended_s)]
    [row] = [row for row in judge([rank(0), rank(1)], [NOTHING] * 2, clocks) if row.topic == "clocks"]
    assert (row.level, words in row.found) == ("warn" if words else "ok", True)


def test_a_port_where_somebody_listens_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert dial("127.0.0.1", port) == ""
    assert dial("127.0.0.1", port) == "Connection refused"


def test_every_host_of_a_large_group_is_dialled_by_a_few():
    assert neighbours(3, 8) == [0, 1, 2, 4, 5, 6, 7]
    dialled = [neighbours(rank, 1000) for rank in range(1000)]
    assert max(map(len, dialled)) <= 10
    assert {other for one in dialled for other in one} == set(range(1000))


def test_files_of_two_ranks_are_seen_and_locked_and_gone_afterwards(tmp_path):
    folder = tmp_path / "runs" / "new"
    with own_file(folder, 0) as (first, a), own_file(folder, 1) as (second, b):
        assert (first, second, [*others_files(folder, [a, b], 0)]) == ([], [], [])
        (folder / "loose").touch()  # as on a file system where locks have no effect
        unseen, unlocked = others_files(folder, [a, b, "loose", "elsewhere"], 0)
        assert "rank 0 does not see what rank 3" in unseen
        assert "a lock of rank 2 does not exclude rank 0" in unlocked
        (folder / "loose").unlink()
    assert list(tmp_path.iterdir()) == []


class Counted(list):
    """A loader with a length and a `take` of batches, as tf.data's: it is no dataset."""

    __getitem__ = property()  # an AttributeError: it has none

    def take(self, count):
        raise AssertionError("not samples by number")


def test_an_experiment_is_read_or_the_reason_told(tmp_path, monkeypatch):
    run = read_run(["--data.name", "digits", "--run-dir", str(tmp_path)])
    assert run["config"]["epochs"]
    assert run["data"]["training data"]["samples"] > 1000
    assert "Did you mean" in read_run(["--data.name", "digitz"])["problem"]
    assert read_run([]) == {"config": {}, "data": {}, "problem": ""}
    streams = Splits(*[Counted([0])] * 3, None)
    monkeypatch.setattr(experiment, "data_of", lambda config: streams)
    assert read_run(["--data.name", "digits"])["data"] == {}


def test_an_all_reduce_that_adds_up_wrongly_is_told(monkeypatch):
    monkeypatch.setattr(group_checks, "_SIZES", (4, 1024))
    assert [check.level for check in wires(alone())] == ["ok"]
    true_sum = replica.psum
    monkeypatch.setattr(replica, "psum", lambda rows: true_sum(rows) + 1)
    (wrong,) = wires(alone())
    assert wrong.level == "FAIL"
    assert wrong.found.startswith("1 ones add up to 2 (4 bytes). HINT: ")
