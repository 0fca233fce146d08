"""A beat is read from outside, in another process's time, and costs next to nothing."""

import time
from contextlib import suppress

from cyxjax.launch import heartbeat


def test_a_beat_is_read_from_outside_with_the_time_of_the_phases_that_ended(tmp_path):
    path = tmp_path / "rank_0.beat"
    writer, began = heartbeat.Reporter(str(path)), time.monotonic()
    writer.report(0, "data")
    time.sleep(0.05)
    writer.report(0, "step")
    time.sleep(0.1)
    writer.report(7, "data")
    seen = heartbeat.read(str(path))
    assert (seen.step, seen.phase, seen.can_dump) == (7, "data", False)
    assert began < seen.at_s <= time.monotonic()
    assert 0.05 <= seen.busy_s < 0.1 <= seen.waiting_s
    writer.allow_dumps()
    assert heartbeat.read(str(path)) == seen._replace(can_dump=True)
    assert path.stat().st_mode & 0o077 == 0


def test_no_file_and_a_short_file_are_an_empty_pulse(tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"123")
    assert heartbeat.read(str(tmp_path / "none")) == heartbeat.read(str(short)) == heartbeat.Progress()


def test_who_waits_for_the_others_says_so_while_it_does(monkeypatch):
    off = heartbeat.Reporter()
    monkeypatch.setattr(heartbeat, "_reporter", off)
    with heartbeat.together():  # before the first step of all: a start has a limit of its own
        assert off.progress().phase == ""
    off.report(3, "eval")
    with suppress(ValueError), heartbeat.together():
        assert (off.progress().step, off.progress().phase) == (3, "collective")
        raise ValueError
    assert (off.progress().step, off.progress().phase) == (3, "eval")
    with heartbeat.together(4):  # of a program that counts its steps by these calls alone
        assert off.progress().step == 4
    assert (off.progress().step, off.progress().phase) == (4, "eval")
