"""Where the time of a run went: all of it is accounted for, and a crash costs what it cost."""

import json

import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.launch import heartbeat
from cyxjax.launch.program import command_line
from cyxjax.observe import step_cost
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import done_line
from cyxjax.observe.sinks import JsonlSink
from cyxjax.train.hooks import goodput
from cyxjax.train.hooks.goodput import CAUSES, line, read, share
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.trainer import DistributedTrainer


class DieAfter(Hook):
    def __init__(self, step):
        self._step = step

    def on_step(self, info):
        if info.position.step == self._step:
            raise RuntimeError("lost")


def fit(folder, *callbacks, **keys):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 4)).astype(np.float32), rng.integers(0, 3, 48).astype(np.int32)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1), callbacks=callbacks)
    config = TrainConfig(
        epochs=4,
        global_batch_size=16,
        run_dir=str(folder),
        checkpoint_every_n_steps=4,
        steps_in_flight=1,
        **keys,
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


def test_what_a_run_computes_is_known_from_its_program(tmp_path, monkeypatch):
    # Dense 4 -> 3 of 16 samples: forward 2*4*3 FLOP a sample, the kernel's gradient as many (no gradient of
    # the inputs); loss, metrics and update come to less than ten times as much again.
    monkeypatch.setattr(step_cost, "_PEAKS", {"cpu": 1e9})
    history = fit(tmp_path)
    assert 48 <= history.flops_per_sample < 480
    told = read(tmp_path / "goodput.json")
    in_steps_s = told["seconds"]["step"] + told["seconds"]["input"]
    assert history.flops_per_second == pytest.approx(history.flops_per_sample * 16 * 12 / in_steps_s)
    assert history.mfu == pytest.approx(history.flops_per_second / history.num_replicas / 1e9)
    assert 50e6 < history.peak_memory_bytes < 100e9
    assert " of memory, " in done_line(history, None)
    assert "(MFU " in done_line(history, None)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["flops_per_second"] == history.flops_per_second
    assert record["peak_memory_bytes"] == history.peak_memory_bytes
    assert record["command"] == command_line()
    assert record["commit"] == history.commit
    assert DistributedTrainingHistory.load(tmp_path / "history.json").mfu == history.mfu
    page = (tmp_path / "report.html").read_text()
    assert "(MFU)" in page
    assert "FLOP/s" in page
    assert "mfu" not in page  # no curve: a number of the whole run


def test_micro_batches_leave_the_work_of_a_sample_as_it_is(tmp_path):
    whole, halves = fit(tmp_path / "a"), fit(tmp_path / "b", gradient_accumulation_steps=2)
    assert halves.flops_per_sample == pytest.approx(whole.flops_per_sample, rel=0.5)


def test_the_peak_of_a_device_is_that_of_its_kind():
    assert step_cost.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert step_cost.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert step_cost.peak_flops("TPU v5 lite") == 197e12
    assert step_cost.peak_flops("cpu") == 0.0


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
