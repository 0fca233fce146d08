"""The live line: what it says, what it drops when narrow, and how it behaves on a real terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from cyxjax.launch import heartbeat
from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.supervise.worker import Files
from cyxjax.observe.console import RichConsole
from cyxjax.observe.lines import Field, doing, fitted, late, live_fields, span, wrapped
from cyxjax.observe.live import LiveLine, Pace

RECORD = {"epoch": 2, "batch": 10, "step": 50, "loss": 0.43212, "accuracy": 0.5, "learning_rate": 0.001,
          "samples_per_second": 12345.6}  # fmt: skip
DRAWN = re.compile(r"\r([^\r\n\x1b]*)\x1b\[K")


def line(width, **changes):
    told = {"doing": "", "step": 57, "total_steps": 400, "left_s": 83.0, "waiting": 0.25} | changes
    return fitted(live_fields(RECORD, **told), width)


def test_a_narrow_line_drops_whole_fields_and_no_digit():
    assert line(200) == (
        "Epoch 3, step 57 of 400, Loss: 0.4321, Accuracy: 0.5000, samples/s: 12,346, LR: 0.001, data 25%, "
        "1 min 23 s left"
    )
    whole = set(line(200).split(", "))
    for width in range(len("step 57 of 400"), 120):
        shown = line(width)
        assert len(shown) <= width
        assert set(shown.split(", ")) <= whole
        assert "step 57 of 400" in shown
    assert line(79) == "Epoch 3, step 57 of 400, Loss: 0.4321, Accuracy: 0.5000, 1 min 23 s left"
    assert line(39) == "step 57 of 400, Loss: 0.4321"
    assert line(39, doing="compiling 12 s") == "compiling 12 s, step 57 of 400"
    assert fitted([Field("longer than that", 0)], 6) == "longer"
    assert fitted([], 10) == ""


def test_news_on_a_narrow_terminal_are_broken_between_numbers():
    text = "Epoch 0, Loss: 1.7882, Accuracy: 0.5676, Val loss: 1.0868, Val accuracy: 0.7833, seconds: 2.5"
    assert wrapped(text, 40).splitlines() == [
        "Epoch 0, Loss: 1.7882, Accuracy: 0.5676,",
        "  Val loss: 1.0868,",
        "  Val accuracy: 0.7833, seconds: 2.5",
    ]
    assert wrapped(text, 200) == text
    assert wrapped("16 samples x 2 replicas = 32 per step", 20).splitlines() == [
        "16 samples x 2",
        "  replicas = 32 per",
        "  step",
    ]
    assert wrapped("/a/path/without/a/space", 10) == "/a/path/without/a/space"
    assert wrapped("", 10) == ""


def test_nobody_has_waited_for_data_before_the_first_step(monkeypatch):
    spent = {"data": 0.5}
    monkeypatch.setattr(heartbeat, "spent", lambda: spent)
    line = LiveLine(print, threading.RLock(), None)
    assert "data" not in line.text(79)
    spent |= {"step": 1.5}
    assert "data 25%" in line.text(79)


@pytest.mark.parametrize(
    ("phase", "step", "for_s", "said"),
    [
        ("compile", 0, 12.3, "compiling 12 s"),
        ("checkpoint", 400, 0.2, "saving step 400"),
        ("checkpoint", -1, 3.0, "restoring 3 s"),
        ("eval", 400, 3.4, "evaluating 3 s"),
        ("data", 400, 0.1, ""),
        ("data", 400, 7.0, "waiting for data 7 s"),
        ("step", 400, 7.0, "waiting for the devices 7 s"),
        ("done", 400, 7.0, ""),
        ("", -1, 0.0, ""),
    ],
)
def test_what_is_going_on(phase, step, for_s, said):
    assert doing(phase, step, for_s) == said


def test_an_evaluation_says_how_far_it_is_until_the_next_beat():
    heartbeat.report_progress(400, "eval")
    try:
        assert LiveLine(print, threading.RLock(), None).text(79).startswith("evaluating, step 400")
        heartbeat.part(3, 5)
        assert LiveLine(print, threading.RLock(), None).text(79).startswith("evaluating 3/5, step 400")
        heartbeat.part(4)  # a loader, whose length nobody knows
        assert heartbeat.part_text() == "4"
        heartbeat.report_progress(400, "step")
        assert heartbeat.part_text() == ""
    finally:
        heartbeat.report_progress(-1, "idle")


def test_a_rank_that_waits_names_those_it_waits_for():
    own = Progress(12, "step")
    others = {
        1: Progress(12, "data"),
        2: Progress(12, "step"),
        3: Progress(11, "step"),
        4: Progress(13, "data"),
        5: Progress(),
    }
    assert late(own, others) == "ranks 1, 3"
    assert late(own, {2: Progress(12, "step")}) == ""
    assert late(Progress(12, "data"), others) == ""
    assert doing("step", 12, 7.0, late="rank 1") == "waiting for rank 1 7 s"


def test_the_ranks_of_this_start_on_this_host_are_found(tmp_path, monkeypatch):
    files = {rank: Files.within(str(tmp_path), rank, 1).beat for rank in (0, 1, 12)}
    beats = {rank: heartbeat.Reporter(path) for rank, path in files.items()}
    heartbeat.Reporter(Files.within(str(tmp_path), 3, 0).beat).report(7, "data")  # of an earlier start
    for rank, writer in beats.items():
        writer.report(rank, "step")
    monkeypatch.setattr(heartbeat, "_reporter", beats[0])
    assert {rank: progress.step for rank, progress in heartbeat.others().items()} == {1: 1, 12: 12}
    monkeypatch.setattr(heartbeat, "_reporter", heartbeat.Reporter())
    assert heartbeat.others() == {}


def test_time_left_is_that_of_the_pace_after_compiling():
    pace = Pace(100)
    assert pace.left_s(10, 1000.0) is None  # the first record: before it lay the compilation
    assert pace.left_s(30, 1004.0) == 14.0  # 20 steps in 4 s, 70 to go
    assert pace.left_s(100, 1018.0) is None
    assert Pace(None).left_s(10, 0.0) is None
    assert [span(s) for s in (3.94, 59.99, 725, 12_000, float("nan"))] == [
        "3.9 s", "60.0 s", "12 min 5 s", "3 h 20 min", "an unknown time",
    ]  # fmt: skip


def resize(fd, columns):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read_until(fd, wanted, limit_s=60.0):
    """What a terminal has received until `wanted(text)`, or until the other side has gone."""
    text, end = "", time.monotonic() + limit_s
    while time.monotonic() < end and not wanted(text):
        if select.select([fd], [], [], 0.2)[0]:
            try:
                data = os.read(fd, 1 << 16)
            except OSError:  # Linux: the last one with the other side open has gone
                return text
            if not data:
                return text
            text += data.decode()
    return text


@pytest.fixture
def terminal():
    master, slave = pty.openpty()
    resize(slave, 80)
    yield master, slave
    os.close(master)
    os.close(slave)


def test_the_line_fits_a_window_that_is_resized_and_news_stand_above_it(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = terminal
    with os.fdopen(os.dup(slave), "w") as stream:
        console = RichConsole(stream)
        console.begin(400)
        try:
            heartbeat.report_progress(57, "data")
            console.step(RECORD)
            wide = read_until(master, lambda text: "Accuracy" in text)
            resize(slave, 40)
            narrow = read_until(master, lambda text: text.count("\r") >= 2)
            console.note("news")
        finally:
            console.end()
            heartbeat.report_progress(-1, "idle")
        stream.flush()
        after = read_until(master, lambda text: "news" in text and text.endswith("\x1b[K"), 2.0)
    assert max(map(len, DRAWN.findall(wide))) <= 79
    last = DRAWN.findall(narrow)[-1]
    assert "step 57 of 400" in last
    assert len(last) <= 39
    assert "\r\x1b[Knews\r\n" in after  # the line made room
    assert "\x1b[?25l" not in wide + narrow + after  # the cursor stays
    assert not [t for t in threading.enumerate() if t.name == "cyxjax-live"]


TRAIN = (
    sys.executable,
    "-m",
    "cyxjax.train",
    "--data.name",
    "digits",
    "--epochs",
    "2",
    "--optimizer.name",
    "sgd",
)


@pytest.mark.slow
def test_a_run_on_a_terminal_of_40_columns(terminal, tmp_path):
    master, slave = terminal
    resize(slave, 40)
    env = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    command = [*TRAIN, "--run-dir", str(tmp_path / "run")]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    text = read_until(master, lambda text: "Next: " in text and text.endswith("\n"), 120.0)
    assert child.wait(60) == 0, text
    assert all(len(drawn) < 40 for drawn in DRAWN.findall(text))
    assert "Epoch 2/2, Loss: " in text
    assert not re.search(r"\x1b\[3\dm|\x1b\[9\dm", text)  # NO_COLOR
    assert "Done: 2 epochs" in text


@pytest.mark.slow
@pytest.mark.parametrize("start", [("nohup",), ("-m", "cyxjax.launch", "--nproc-per-node", "1")])
def test_a_run_into_a_file_writes_lines_only(tmp_path, start):
    command = [*TRAIN, "--run-dir", str(tmp_path / "run")]
    command = [*start, *command] if start[0] == "nohup" else [sys.executable, *start, *command[1:]]
    with (tmp_path / "log").open("w") as log:
        code = subprocess.run(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False, timeout=150
        )
    text = (tmp_path / "log").read_text()
    assert code.returncode == 0, text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert re.search(r"Epoch 1/2, Batch 10, Loss: .*, step 10 of 40", text)


@pytest.mark.slow
def test_the_launcher_draws_the_live_line_of_rank_0_in_colour_and_keeps_it_out_of_the_log(terminal, tmp_path):
    master, slave = terminal
    env = os.environ | {"TERM": "xterm"}
    start = [
        sys.executable,
        "-m",
        "cyxjax.launch",
        "--nproc-per-node",
        "2",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    # Several times as long as the live line waits for its first time.
    train = ["60" if word == "2" else word for word in TRAIN[1:]]
    command = [*start, *train, "--run-dir", str(tmp_path / "run"), "--log-every-n-batches", "1"]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    text = read_until(master, lambda text: "Next: " in text and text.endswith("\n"), 150.0)
    assert child.wait(60) == 0, text
    drawn = DRAWN.findall(text)
    assert any("step " in line and line.startswith("[rank 0] ") for line in drawn), text
    assert max(map(len, drawn)) < 80
    assert re.search(r"\x1b\[1[;m]", text)  # bold, as in one process
    assert "cyxjax-live" not in text
    log = (tmp_path / "logs" / "start_0" / "rank_0.log").read_text()
    assert "Epoch 60/60, Loss: " in log
    assert "cyxjax-live" not in log
