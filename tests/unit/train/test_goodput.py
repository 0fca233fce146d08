"""Where the time of a run went: all of it is accounted for, and a crash costs what it cost."""

import json

import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.launch import heartbeat
from cyxjax.observe.file_sinks import JsonlSink
from cyxjax.train.hooks import goodput
from cyxjax.train.hooks.goodput import CAUSES, line, read, share
from cyxjax.train.loop import Hook
from cyxjax.train.trainer import DistributedTrainer


class DieAfter(Hook):
    def __init__(self, step):
        self._step = step

    def on_step(self, info):
        if info.position.step == self._step:
            raise RuntimeError("lost")


def fit(folder, *callbacks):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 4)).astype(np.float32), rng.integers(0, 3, 48).astype(np.int32)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1), callbacks=callbacks)
    config = TrainConfig(
        epochs=4, global_batch_size=16, run_dir=str(folder), checkpoint_every_n_steps=4, steps_in_flight=1
    )
    return trainer.fit(
        x, y, x, y, config, open_sink=lambda step: JsonlSink(folder / "metrics.jsonl", resume_step=step)
    )


def test_an_undisturbed_run_accounts_for_its_time(tmp_path, capsys):
    history = fit(tmp_path)
    told = read(tmp_path / "goodput.json")
    assert told["ended"]
    assert told["steps"] == 12
    assert set(told["seconds"]) == {"step", *CAUSES}
    assert told["seconds"]["compile"] > 0
    assert told["seconds"]["evaluation"] > 0
    assert told["seconds"]["restart"] == told["seconds"]["redone"] == 0
    assert 0 < history.goodput == share(told["seconds"]) < 1
    # All but the process's start is the time of the fit itself (which ends a little later).
    inside = sum(s for name, s in told["seconds"].items() if name not in ("start", "restore"))
    assert inside <= history.total_time_seconds + 1.0  # what is written between the two clocks
    assert inside >= 0.5 * history.total_time_seconds
    assert "Goodput: " in capsys.readouterr().out
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "goodput"
    assert last["seconds_compile"] == told["seconds"]["compile"]


def test_a_crash_costs_a_restart_and_the_steps_since_the_last_save(tmp_path, monkeypatch):
    monkeypatch.setattr(goodput, "_EVERY_S", 0.0)
    with pytest.raises(RuntimeError, match="lost"):
        fit(tmp_path, DieAfter(7))
    before = read(tmp_path / "goodput.json")
    assert (before["ended"], before["step"]) == (False, 6)  # told before the hook that died
    monkeypatch.setattr(heartbeat, "_spent", {})  # as in a new process
    monkeypatch.setattr(heartbeat, "_detected_s", 0.001)
    fit(tmp_path)
    after = read(tmp_path / "goodput.json")
    assert after["steps"] == 12  # steps 5 and 6 were made twice and count once
    assert after["seconds"]["detect"] == 0.001
    assert after["seconds"]["restart"] > 0
    assert after["seconds"]["restore"] > 0
    assert after["seconds"]["redone"] == pytest.approx(before["seconds"]["step"] / 3)


def test_the_line_says_the_largest_loss_first():
    seconds = {"step": 93.0, "compile": 4.0, "redone": 2.5, "checkpoint": 0.5, "input": 0.01}
    assert line(seconds) == (
        "Goodput: 93% of 100.0 s were steps that count; the rest: "
        "compile 4.0 s, redone steps 2.5 s, checkpoint 0.5 s."
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seconds": 3}', '{"seconds": {"step": "x"}}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path, text):
    (tmp_path / "goodput.json").write_text(text)
    assert read(tmp_path / "goodput.json") == {}
