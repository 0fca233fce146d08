"""`cyxjax doctor` in a group: one row with one remedy for each thing that is wrong, planted one at a time."""

import time

import jax
import numpy as np
import pytest

from cyxjax.cli import group_checks
from cyxjax.cli.group_checks import judge, others_files, own_file, two_steps, wires
from cyxjax.cli.group_doctor import clock, neighbours, ping, read_run
from cyxjax.core import mesh, replica
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.launch.topology import Topology

SEEN = {"error": "", "addresses": ["10.0.0.1"]}
CONTENT = {"samples": 10, "records": {"3": [["int", "7"]]}}


def rank(number, **other):
    """What rank `number` of two, on two hosts, says and sees where nothing is wrong."""
    mine, its = ("a", "b") if number == 0 else ("b", "a")
    ends = {"a": "10.0.0.1", "b": "10.0.0.2"}
    seen = {str(1 - number): SEEN | {"addresses": [ends[its]]}}
    return {
        "host": mine,
        "address": ends[mine],
        "port": 4000,
        "software": {"python": "3.11", "optax": "0.2.6"},
        "memory_bytes": 8e9,
        "disk_bytes": 9e9,
        "folder": "/runs",
        "devices": {"the number of devices": "4"},
        "seen": seen,
        "clock": (0.0, 0.001),
        "files": {"error": "", "unseen": [], "unlocked": []},
        "config": {"epochs": "3"},
        "data": {"training data": CONTENT},
        "problem": "",
    } | other


def found(**other):
    """The rows that are not ok, where rank 1 differs in `other`."""
    return [check for check in judge([rank(0), rank(1, **other)]) if check.level != "ok"]


def test_nothing_is_wrong():
    assert found() == []
    rows = {check.topic: check.found for check in judge([rank(0), rank(1)])}
    assert rows["group"] == "2 ranks on 2 hosts met with the same code: a: rank 0; b: rank 1"
    assert rows["data"] == "training data: 10 samples, equal on all ranks"
    topics = "group names ports clocks versions config data devices memory disk folder"
    assert [*rows] == topics.split()


@pytest.mark.parametrize(
    ("topic", "level", "fault", "words"),
    [
        (
            "names",
            "warn",
            {"seen": {"0": SEEN | {"addresses": ["127.0.1.1"]}}},
            "rank 1 a leads to 127.0.1.1, not to 10.0",
        ),
        ("names", "warn", {"seen": {"0": SEEN | {"addresses": []}}}, "a leads to nowhere"),
        (
            "ports",
            "FAIL",
            {"seen": {"0": SEEN | {"error": "timed out"}}},
            "rank 1 (b) cannot reach rank 0 at 10.0.0.1:4000",
        ),
        ("clocks", "warn", {"clock": (-3.0, 0.001)}, "rank 1 (b) is -3.0 s from rank 0's"),
        ("clocks", "warn", {"clock": (63.5, 0.001)}, "+63.5 s from"),
        (
            "versions",
            "FAIL",
            {"software": {"python": "3.11", "optax": "0.3"}},
            "optax: 0.2.6 on rank 0; 0.3 on rank 1",
        ),
        (
            "versions",
            "FAIL",
            {"software": {"python": "3.11"}},
            "optax: 0.2.6 on rank 0; (none) on rank 1",
        ),
        ("config", "FAIL", {"config": {"epochs": "4"}}, "epochs: 3 on rank 0; 4 on rank 1"),
        (
            "config",
            "FAIL",
            {"problem": "x.yaml: no such file. HINT: name one."},
            "on rank 1: x.yaml: no such file",
        ),
        ("data", "FAIL", {"data": {"training data": CONTENT | {"samples": 9}}}, "10 on rank 0, 9 on rank 1"),
        (
            "devices",
            "warn",
            {"devices": {"the number of devices": "2"}},
            "the number of devices: 4 on rank 0; 2 on rank 1",
        ),
        ("memory", "warn", {"memory_bytes": 5e8}, "0.5 GB of memory free, on rank 1 (b)"),
        ("disk", "warn", {"disk_bytes": 1e8}, "0.1 GB of disk free, on rank 1 (b)"),
        (
            "folder",
            "FAIL",
            {"files": {"error": "Read-only file system", "unseen": [], "unlocked": []}},
            "Read-only",
        ),
        (
            "folder",
            "warn",
            {"files": {"error": "", "unseen": [0], "unlocked": []}},
            "rank 1 does not see what rank 0",
        ),
        (
            "folder",
            "warn",
            {"files": {"error": "", "unseen": [], "unlocked": [0]}},
            "a lock of rank 0 does not hold",
        ),
    ],
)
def test_a_fault_is_one_row_with_one_remedy(topic, level, fault, words):
    (row,) = found(**fault)
    assert (row.topic, row.level) == (topic, level)
    assert words in row.found
    assert row.found.count("HINT:") == 1


def test_a_slow_answer_is_no_wrong_clock():
    # 1.5 s ahead, known to 0.9 s: it may be right.
    assert found(clock=(1.5, 0.9)) == []


def test_a_clock_that_is_wrong_is_seen_through_a_socket():
    with clock(lambda: time.time() - 90) as port:
        error, ahead = ping("127.0.0.1", port)
        assert (error, ahead[0] == pytest.approx(90, abs=30)) == ("", True)
        assert 0 <= ahead[1] < 30
    assert ping("127.0.0.1", port) == ("Connection refused", None)


def test_every_host_of_a_large_group_is_dialled_by_a_few():
    assert neighbours(0, 2) == [1]
    assert neighbours(3, 8) == [0, 1, 2, 4, 5, 6, 7]
    dialled = [neighbours(rank, 1000) for rank in range(1000)]
    assert max(map(len, dialled)) <= 11
    assert {other for one in dialled for other in one} == set(range(1000))


def test_files_of_two_ranks_are_seen_and_locked_and_gone_afterwards(tmp_path):
    folder = tmp_path / "runs" / "new"
    with own_file(folder, 0) as (first, a), own_file(folder, 1) as (second, b):
        assert (first, second) == ("", "")
        assert others_files(folder, [a, b], 0) == {"unseen": [], "unlocked": []}
        (folder / "loose").touch()  # as where locks hold nobody off
        assert others_files(folder, [a, b, "loose", "elsewhere"], 0) == {"unseen": [3], "unlocked": [2]}
        (folder / "loose").unlink()
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_is_read_or_the_reason_told(tmp_path):
    run = read_run(["--data.name", "digits", "--run-dir", str(tmp_path)])
    assert run["config"]["epochs"]
    assert run["data"]["training data"]["samples"] > 1000
    assert "Did you mean" in read_run(["--data.name", "digitz"])["problem"]
    assert read_run([]) == {"config": {}, "data": {}, "problem": ""}


@pytest.fixture
def group():
    return ProcessGroup(Topology(), "gloo", mesh.build_mesh(jax.devices()[:1]))


def test_an_all_reduce_that_adds_up_wrongly_is_told(group, monkeypatch):
    monkeypatch.setattr(group_checks, "_SIZES", (4, 1024))
    (fine,) = wires(group)
    assert (fine.level, fine.topic) == ("ok", "wires")
    true_sum = replica.psum
    monkeypatch.setattr(replica, "psum", lambda rows: true_sum(rows) + 1)
    (wrong,) = wires(group)
    assert (wrong.level, wrong.topic) == ("FAIL", "wires")
    devices = group.mesh.size
    assert wrong.found.startswith(f"{devices} ones add up to {devices + 1} (4 bytes). HINT: ")


def test_devices_that_train_other_parameters_than_one_are_told(group, monkeypatch):
    results = iter([{"kernel": np.full(3, 1.25)}, {"kernel": np.ones(3)}])  # of the group, then of one device
    monkeypatch.setattr(group_checks, "_trained", lambda devices, replicas: next(results))
    monkeypatch.setattr(mesh, "local_value", np.asarray)
    found = two_steps(group)
    assert (found.level, found.topic) == ("FAIL", "training")
    assert "train other parameters than one: kernel by 0.25. HINT: " in found.found
