"""`cyxjax top`: the state of ranks from their heartbeats and the kernel's files."""

import os
import re

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch.failure import hooks
from cyxjax.launch.heartbeat import Progress, Reporter
from cyxjax.launch.supervise import top
from cyxjax.launch.supervise.dump import running
from cyxjax.launch.supervise.top import Row, look, shown, waits
from cyxjax.launch.supervise.worker import LAUNCHER


def row(rank, step, phase, at_s, memory=512_000_000, busy_s=1.0, waiting_s=3.0, suspended=False):
    return Row(rank, 100 + rank, Progress(step, phase, at_s, busy_s, waiting_s), memory, suspended)


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """A /proc with two ranks of job `mine` and one of `other`; beats of the two."""

    def rank(pid, launcher, number, job):
        folder, beat = tmp_path / "proc" / str(pid), tmp_path / f"{pid}.beat"
        folder.mkdir(parents=True)
        names = {"RANK": number, "CYXJAX_RUN_ID": job, "CYXJAX_BEAT_FILE": beat, hooks.STACKS: "x"}
        names[LAUNCHER] = f"{launcher}:7"
        folder.joinpath("environ").write_text("\0".join(f"{k}={v}" for k, v in names.items()))
        folder.joinpath("stat").write_text(stat_line(pid, "S", launcher))
        return Reporter(str(beat))

    for launcher in (90, 190):
        (tmp_path / "proc" / str(launcher)).mkdir(parents=True)
        (tmp_path / "proc" / str(launcher) / "stat").write_text(stat_line(launcher, "S", 1, start=7))
    beats = [rank(101, 90, 1, "mine"), rank(100, 90, 0, "mine")]
    rank(200, 190, 0, "other")
    monkeypatch.setattr(top, "PROC", tmp_path / "proc")
    beats[0].report(7, "data")
    beats[1].report(7, "step")
    return tmp_path / "proc"


def stat_line(pid, state, parent, start=8):
    return f"{pid} (a ) b) {state} {parent} {'0 ' * 17}{start} 0 25"


@pytest.mark.parametrize(
    ("pid", "line"),
    [
        (90, ("S", 1, 8)),  # another process has the launcher's number now
        (90, None),  # none has
        (101, ("S", 190)),  # a child of a rank, which has its environment, or an orphan
    ],
)
def test_what_a_launcher_has_not_started_is_no_rank(processes, pid, line):
    stat = processes / str(pid) / "stat"
    stat.unlink() if line is None else stat.write_text(stat_line(pid, *line))
    found = {(rank.run_id, rank.rank) for rank in running(processes)}
    assert found == {("other", 0)} | ({("mine", 0)} if pid == 101 else set())


def test_a_suspended_rank_is_seen(processes):
    path = processes / "101" / "stat"
    path.write_text(stat_line(101, "T", 90))
    ranks = [rank for rank in running(processes) if rank.run_id == "mine"]
    assert [r.as_json(0.0)["suspended"] for r in look(ranks, processes)] == [False, True]
    path.unlink()
    found = [(r.is_suspended, r.memory_bytes) for r in look(ranks, processes)]
    assert found == [(False, 25 * os.sysconf("SC_PAGE_SIZE")), (False, None)]


def test_two_jobs_must_be_told_apart(processes, capsys):
    for words in ([], ["none-of-these"]):
        with pytest.raises(GroupError, match=r"mine \(launcher 90, ranks 0.*other \(launcher 190"):
            top.main(words)
    assert top.main(["100"]) == 0  # the pid of a rank selects its job; without a terminal it prints once
    assert "job mine: 2 ranks here" in capsys.readouterr().out


def test_a_table_with_one_line_a_rank():
    rows = [row(0, 120, "step", 98.0), row(1, 7, "step", 98.0, suspended=True), Row(2, 102, Progress(), None)]
    assert shown("a\x1bb", rows, 100.0) == [
        r"job a\x1bb: 3 ranks here",
        "rank  step             phase    for  memory  pid",
        "   0   120              step  2.0 s  512 MB  100",
        "   1     7         suspended  2.0 s  512 MB  101",
        "   2     -  no heartbeat yet      -       -  102",
        "rank 0 waits for rank 1: suspended, step 7. HINT: `kill -CONT 101` resumes it",
    ]


BUSY, WAITS = row(1, 119, "data", 88.0), row(0, 120, "step", 90.0)


@pytest.mark.parametrize(
    ("rows", "output"),
    [
        ([WAITS, BUSY, row(2, 120, "step", 90.0)], "ranks 0, 2 wait for rank 1: data for 12 s, step 119"),
        ([row(0, 120, "step", 99.9), BUSY], ""),  # not for long
        ([WAITS, row(1, 120, "step", 90.0)], ""),  # all in one step
        ([row(0, 120, "done", 90.0), BUSY], ""),
    ],
)
def test_who_waits_for_whom(rows, output):
    assert waits(rows, 100.0) == output


def test_a_job_is_watched_through_a_restart_until_it_has_ended(processes, monkeypatch, printed):
    moves = ["proc/101 a", "proc/100 b", "b proc/103", "proc/90 c"]  # between two starts there is no rank
    monkeypatch.setattr(top.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top.time, "sleep", lambda seconds: os.rename(*moves.pop(0).split()))
    monkeypatch.chdir(processes.parent)
    output = printed(top.main, "mine")
    assert re.findall(r"job mine: (\d)", output) == ["2", "1", "0", "1"]
    assert output.endswith("The job has ended.\n")
