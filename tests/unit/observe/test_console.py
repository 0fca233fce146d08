"""Console lines: fixed formats, rank 0 only, no control characters in a pipe; and the live line."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from cyxjax.launch import heartbeat
from cyxjax.observe import NullConsole, PlainConsole, RichConsole, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import RunLines, batch_plan_line, doing, done_line, fitted, line_of_test

STEP = {
    "kind": "step",
    "epoch": 2,
    "batch": 10,
    "step": 70,
    "loss": 0.43212,
    "accuracy": 0.5,
    "learning_rate": 0.001,
}
EPOCH = {"epoch": 2, "train_loss": np.float32(0.25), "val_loss": float("nan"), "samples_per_second": 4321.0}
HISTORY = DistributedTrainingHistory(
    train_losses=[1.0, 0.5], val_accuracies=[0.25, 0.75], val_epochs=[0, 1], val_steps=[4, 8],
    total_time_seconds=2.0, samples_per_second=4321.0,
)  # fmt: skip
DRAWN = re.compile(r"\r([^\r\n\x1b]*)\x1b\[K")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def copying(write):
    """The stdout of a program that copies what it prints into a file: it has the two methods of `print`."""
    return SimpleNamespace(write=write, flush=lambda: None)


def report_run(console):
    console.note("Process 0/2 started")
    console.note(batch_plan_line(32, 4, 2, {"world_size": 2}))
    console.step(STEP)
    console.epoch(EPOCH)
    console.note(done_line(HISTORY, "runs/[x]"))


def test_plain_lines():
    stream, written = io.StringIO(), []
    report_run(PlainConsole(stream))
    report_run(PlainConsole(copying(written.append)))
    assert "".join(written) == stream.getvalue()
    assert stream.getvalue().splitlines() == [
        "Process 0/2 started",
        "Batch plan: 32 samples x 4 replicas x 2 accumulation = 256 per step; world_size 2",
        "Epoch 3, Batch 10, Loss: 0.4321, Accuracy: 0.5000, LR: 0.001",
        "Epoch 3, Loss: 0.2500, Val loss: nan, samples/s: 4,321",
        "Done: 2 epochs in 2.0 s, 4,321 samples/s, best Val accuracy 0.7500 (epoch 2), last 0.7500. "
        "Run folder: runs/[x]",
    ]


def test_epochs_stand_under_each_other_and_the_best_one_is_marked():
    lines, took = RunLines(400, 20), {"seconds": 0.5}
    first, second = ({"epoch": epoch, "train_loss": loss} | took for epoch, loss in ((8, 12.5), (9, 0.25)))
    assert lines.epoch_line(first) == "Epoch  9/20, Loss: 12.5000, seconds: 0.5"
    assert lines.epoch_line(second, "val_f1").endswith("Loss:  0.2500, seconds: 0.5, best Val f1 so far")


def test_the_last_line_says_what_came_out():
    nan = float("nan")
    history = DistributedTrainingHistory(
        train_losses=[1.0], val_losses=[nan, 0.25, 0.5, 0.75], val_accuracies=[nan] * 4,
        val_epochs=[0, 2, 2, 3], val_steps=[4, 12, 10, 14], stopped_by="max_steps",
    )  # fmt: skip
    # 0.25 was undone by a rollback
    assert "best Val loss 0.5000 (epoch 3), last 0.7500, stopped by max_steps." in done_line(history, None)
    assert line_of_test({"loss": 0.25, "accuracy": nan}) == "Test: loss 0.2500"


def test_a_terminal_gets_the_same_news_in_its_columns():
    stream = Terminal()
    report_run(RichConsole(stream, columns=40))
    shown = stream.getvalue()
    for part in ("Process 0/2 started", "= 256 per", "Loss: 0.2500", "runs/[x]"):
        assert part in shown
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in shown.splitlines()) <= 40


@pytest.mark.parametrize(
    ("master", "verbose", "stream", "kind", "dumb"),
    [
        (True, True, io.StringIO(), PlainConsole, PlainConsole),
        (True, True, Terminal(), RichConsole, PlainConsole),
        (False, True, Terminal(), NullConsole, NullConsole),
        (True, False, Terminal(), NullConsole, NullConsole),
        (True, True, None, NullConsole, NullConsole),  # closed
        (True, True, copying(print), PlainConsole, PlainConsole),
    ],
)
def test_which_console(master, verbose, stream, kind, dumb, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert type(build_console(master, verbose)) is kind
    monkeypatch.setenv("TERM", "dumb")
    assert type(build_console(master, verbose)) is dumb


def test_a_log_has_a_line_of_progress_an_interval_however_many_steps_there_are(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("cyxjax.observe.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.begin(400)
    for step in range(10, 110, 10):  # a record each 4 s: told at 0, 12, 24, 36 s
        console.step(STEP | {"step": step})
        now[0] += 4.0
    progress = [line.partition("LR: 0.001, ")[2] for line in stream.getvalue().splitlines()]
    assert progress == [
        "step 10 of 400",
        "step 40 of 400, 2 min 24 s left",  # 360 steps at 30 in 12 s
        "step 70 of 400, 2 min 12 s left",
        "step 100 of 400, 2 min 0 s left",
    ]


@pytest.mark.parametrize("kind", [PlainConsole, RichConsole])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O on a closed file")])
def test_a_reader_that_went_away_does_not_end_the_run(kind, error):
    class Gone(io.StringIO):
        write = Mock(side_effect=error)  # the error of a lost terminal, or of a closed stream

    report_run(kind(Gone()))
    assert Gone.write.called


def test_a_terminal_of_ascii_only_still_shows_the_rest():
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    PlainConsole(stream).note("läuft")
    assert raw.getvalue() == b"l?uft\n"


def test_a_narrow_live_line_drops_whole_parts_and_no_digit():
    lines = RunLines(400)
    lines.left(STEP | {"step": 10}, 0.0)
    parts = lines.live(STEP, 71, "", lines.left(STEP, 15.0))
    whole = "step 71 of 400, Epoch 3, Loss: 0.4321, 1 min 22 s left, Accuracy: 0.5000, LR: 0.001"
    assert fitted(parts, 100) == whole  # 330 steps at 4 per second
    assert fitted(parts, 39) == "step 71 of 400, Epoch 3, Loss: 0.4321"
    assert fitted(parts, 50) == "step 71 of 400, Epoch 3, Loss: 0.4321, LR: 0.001"
    assert fitted(["longer than that"], 6) == "longer"
    assert fitted([], 10) == ""


@pytest.mark.parametrize(
    ("phase", "for_s", "text"),
    [
        ("compile", 12.3, "compiling 12 s"),
        ("checkpoint", 0.2, "checkpoint"),
        ("data", 0.1, ""),
        ("data", 7.0, "waiting for data 7 s"),
        ("step", 7.0, "waiting for the devices 7 s"),
        ("done", 7.0, ""),
        ("", 0.0, ""),
    ],
)
def test_what_is_going_on(phase, for_s, text):
    assert doing(phase, for_s) == text


def test_an_evaluation_says_how_far_it_is_until_the_next_beat():
    console = RichConsole(io.StringIO())
    heartbeat.report_progress(400, "eval")
    try:
        assert console.live_text(79) == "evaluating, step 400"
        heartbeat.part(3, 5)
        assert console.live_text(79) == "evaluating 3/5, step 400"
        heartbeat.part(4)  # a loader of unknown length
        assert heartbeat.part_text() == "4"
        heartbeat.report_progress(400, "step")
        assert console.live_text(79) == "step 400"
    finally:
        heartbeat.report_progress(-1, "idle")


def resize(fd, columns):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read_until(fd, wanted, limit_s=60.0):
    """The text that a terminal has received until `wanted(text)`, or until the other side has closed."""
    text, end = "", time.monotonic() + limit_s
    while time.monotonic() < end and not wanted(text):
        if select.select([fd], [], [], 0.2)[0]:
            try:
                data = os.read(fd, 1 << 16)
            except OSError:  # Linux: the last process has closed the other side
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


def on_terminal(slave, *command, **more):
    # COLUMNS, which pytest's workers have, would be taken for the width.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    variables = inherited | {"TERM": "xterm"} | more
    return subprocess.Popen(
        [sys.executable, *command], stdin=slave, stdout=slave, stderr=slave, env=variables
    )


LIVE = """
import sys
import threading
from cyxjax.launch import heartbeat
from cyxjax.observe.console import build_console

console = build_console(True)
console.begin(400)
heartbeat.report_progress(57, "data")
console.step({"epoch": 2, "step": 50, "loss": 0.4321, "accuracy": 0.5, "learning_rate": 0.001, "top_5": 0.75})
sys.stdin.readline()
console.note("news")
console.end()
assert [t.name for t in threading.enumerate()] == ["MainThread"]
"""


def test_the_line_fits_a_window_that_is_resized_and_news_stand_above_it(terminal):
    master, slave = terminal
    child = on_terminal(slave, "-c", LIVE)
    wide = read_until(master, lambda text: "Accuracy" in text)
    resize(slave, 40)
    # Lines drawn before the window was resized may still arrive.
    narrow = read_until(master, lambda text: text.count("\r") >= 2 and len(DRAWN.findall(text)[-1]) <= 39)
    os.write(master, b"\n")
    after = read_until(master, lambda text: "news" in text)
    assert child.wait(60) == 0, after
    assert max(map(len, DRAWN.findall(wide))) > 50
    last = DRAWN.findall(narrow)[-1]
    assert "step 57 of 400" in last
    assert len(last) <= 39
    assert "\r\x1b[Knews\r\n" in after  # the line was cleared first
    assert "\x1b[?25l" not in wide + narrow + after  # the cursor stays


TRAIN = ["-m", "cyxjax.train", "--data.name", "digits", "--optimizer.name", "sgd", "--epochs"]


LAUNCH = ["-m", "cyxjax.launch", "--nproc-per-node"]


@pytest.mark.slow
def test_a_run_into_a_file_writes_lines_only(tmp_path):
    command = [sys.executable, *LAUNCH, "1", *TRAIN, "2", "--run-dir", str(tmp_path / "run")]
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
    # 60 epochs take several times as long as the live line waits for its first time.
    train = [*TRAIN, "60", "--run-dir", str(tmp_path / "run"), "--log-every-n-batches", "1"]
    child = on_terminal(slave, *LAUNCH, "2", "--log-dir", str(tmp_path / "logs"), *train)
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
