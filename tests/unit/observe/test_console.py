"""Lines people read: fixed formats, rank 0 only, no control characters in a pipe."""

import io

import numpy as np
import pytest

from cyxjax.observe import NullConsole, PlainConsole, RichConsole, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import batch_plan_line, done_line, line_of_test

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
    train_losses=[1.0, 0.5], val_accuracies=[0.25, 0.75], total_time_seconds=2.0, samples_per_second=4321.0
)


def test_the_last_line_of_a_task_without_accuracy():
    history = DistributedTrainingHistory(
        train_losses=[1.0], val_losses=[float("nan"), 0.5, 0.75], val_accuracies=[float("nan")] * 3
    )
    assert "best Val loss 0.5000" in done_line(history, None)
    assert "Val accuracy" not in done_line(history, None)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def tell(console):
    console.note("Process 0/2 started")
    console.note(batch_plan_line(32, 4, 2, {"world_size": 2}))
    console.step(STEP)
    console.epoch(EPOCH)
    console.note(done_line(HISTORY, "runs/[x]"))


def test_plain_lines():
    stream = io.StringIO()
    tell(PlainConsole(stream))
    assert stream.getvalue().splitlines() == [
        "Process 0/2 started",
        "Batch plan: 32 samples x 4 replicas x 2 accumulation = 256 per step; world_size 2",
        "Epoch 3, Batch 10, Loss: 0.4321, Accuracy: 0.5000, LR: 0.001",
        "Epoch 3, Loss: 0.2500, Val loss: nan, samples/s: 4,321",
        "Done: 2 epochs in 2.0 s, 4,321 samples/s, best Val accuracy 0.7500, last 0.7500. "
        "Run folder: runs/[x]",
    ]


def test_epochs_stand_under_each_other_and_the_best_one_is_marked():
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.begin(400, 20)
    for epoch, loss in ((8, 12.5), (9, 0.25)):
        console.epoch({"epoch": epoch, "train_loss": loss, "seconds": 0.5}, is_best=epoch == 9)
    assert stream.getvalue().splitlines() == [
        "Epoch  9/20, Loss: 12.5000, seconds: 0.5",
        "Epoch 10/20, Loss:  0.2500, seconds: 0.5, best so far",
    ]


def test_one_of_a_thing_is_no_plural():
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.note(batch_plan_line(1, 1, 1, {}))
    console.note(done_line(DistributedTrainingHistory(train_losses=[1.0]), None))
    assert stream.getvalue().startswith("Batch plan: 1 sample x 1 replica x 1 accumulation = 1 per step")
    assert "Done: 1 epoch in" in stream.getvalue()


def test_a_terminal_gets_the_same_news():
    stream = Terminal()
    tell(RichConsole(stream))
    shown = stream.getvalue()
    for part in ("Process 0/2 started", "= 256 per step", "Loss: 0.2500", "Run folder: runs/[x]"):
        assert part in shown


@pytest.mark.parametrize(
    ("master", "verbose", "stream", "kind"),
    [
        (True, True, io.StringIO(), PlainConsole),
        (True, True, Terminal(), RichConsole),
        (False, True, Terminal(), NullConsole),
        (True, False, Terminal(), NullConsole),
    ],
)
def test_which_console(master, verbose, stream, kind):
    assert type(build_console(master, verbose, stream)) is kind


def test_silence_is_silent(capsys):
    tell(NullConsole())
    assert capsys.readouterr() == ("", "")


def test_a_log_has_a_line_of_progress_an_interval_however_many_steps_there_are(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("cyxjax.observe.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = PlainConsole(stream, every_s=10.0)
    console.begin(400)
    for step in range(10, 110, 10):  # a record each 4 s: told at 0, 12, 24, 36 s
        console.step(STEP | {"step": step})
        now[0] += 4.0
    told = [line.partition("LR: 0.001, ")[2] for line in stream.getvalue().splitlines()]
    assert told == [
        "step 10 of 400",
        "step 40 of 400, 2 min 24 s left",  # 360 steps at 30 in 12 s
        "step 70 of 400, 2 min 12 s left",
        "step 100 of 400, 2 min 0 s left",
    ]


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(build_console(True, True, Terminal())) is PlainConsole


def test_a_run_that_ended_within_its_first_epoch_tells_its_steps():
    history = DistributedTrainingHistory(num_steps=12, total_time_seconds=8.25, stopped_by="max_steps")
    assert done_line(history, None) == "Done: 12 steps in 8.2 s, 0 samples/s, stopped by max_steps."


def test_of_many_metrics_the_line_of_the_test_shows_the_first():
    assert line_of_test({"loss": 0.25, "accuracy": float("nan")}) == "Test: loss 0.2500"
    many = {"loss": 0.25, "accuracy": 0.5} | {f"recall_{n}": 1.0 for n in range(10)}
    assert line_of_test(many) == (
        "Test: loss 0.2500, accuracy 0.5000, recall_0 1.0000, recall_1 1.0000, recall_2 1.0000, "
        "recall_3 1.0000, and 6 more"
    )


def test_the_last_line_names_the_epoch_of_the_best():
    history = DistributedTrainingHistory(
        train_losses=[1.0] * 4,
        val_accuracies=[0.5, 0.75, 0.25],
        val_epochs=[0, 2, 3],
        total_time_seconds=125.0,
    )
    assert "4 epochs in 2 min 5 s" in done_line(history, None)
    assert "best Val accuracy 0.7500 (epoch 3), last 0.2500." in done_line(history, None)


@pytest.mark.parametrize("kind", [PlainConsole, RichConsole])
def test_a_reader_that_went_away_does_not_end_the_run(kind):
    tried = []

    class Gone(io.StringIO):
        def write(self, text):
            tried.append(text)
            raise OSError(5, "Input/output error")  # what a lost terminal gives

    tell(kind(Gone()))
    assert tried
    closed = io.StringIO()
    console = kind(closed)
    closed.close()
    tell(console)


def test_a_terminal_of_ascii_only_still_shows_the_rest():
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="ascii"))
    console.note("läuft")
    console.note("on")
    assert raw.getvalue() == b"l?uft\non\n"
