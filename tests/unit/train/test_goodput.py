"""The time of a run by cause: all of it is accounted for, including the cost of a crash."""

import json
import shutil
import time
from unittest import mock

import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax import files
from cyxjax.launch import heartbeat
from cyxjax.launch.program import command_line
from cyxjax.observe import devices
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import done_line
from cyxjax.train import loop
from cyxjax.train.hooks import goodput
from cyxjax.train.hooks.goodput import CAUSES, read, share
from cyxjax.train.reporting import device_use
from tests.support.trainers import At, X, Y, config, does, fitted, lose, trainer

pytestmark = pytest.mark.usefixtures("two_devices")


def fit(folder, *callbacks, **changes):
    """A trainer after 12 steps of 16 samples."""
    data, options = (X[:48], Y[:48]), {"batch_size": None, "global_batch_size": 16, "epochs": 4}
    options |= {"run_dir": str(folder), "checkpoint_every_n_steps": 4, "steps_in_flight": 1}
    return fitted(*callbacks, data=(*data, *data), verbose=True, **options | changes)


def test_an_undisturbed_run_accounts_for_its_time_and_its_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(devices, "_PEAKS", {"cpu": 1e9})
    history = fit(tmp_path).history
    report = read(tmp_path / "goodput.json")
    seconds = report["seconds"]
    assert (report["ended"], report["steps"]) == (True, 12)
    assert set(seconds) == {"step", *CAUSES}
    assert seconds["compile"] > 0
    assert seconds["evaluation"] > 0
    assert seconds["restart"] == seconds["redone"] == 0
    assert 0 < history.goodput == share(seconds) < 1
    # All but the process's start is the time of the fit itself (which ends a little later).
    inside = sum(s for name, s in seconds.items() if name not in ("start", "restore"))
    assert inside <= history.total_time_seconds + 1.0  # what is written between the two clocks
    assert inside >= 0.5 * history.total_time_seconds
    assert "Goodput: " in capsys.readouterr().out
    # Dense 6 -> 3: forward 2*6*3 FLOP a sample, the kernel's gradient as many (no gradient of the inputs);
    # loss, metrics and update come to less than ten times as much again.
    assert 72 <= history.flops_per_sample < 720
    in_steps_s = seconds["step"] + seconds["input"]
    assert history.flops_per_second == pytest.approx(history.flops_per_sample * 16 * 12 / in_steps_s)
    assert history.mfu == pytest.approx(history.flops_per_second / history.num_replicas / 1e9)
    assert 50e6 < history.peak_memory_bytes < 100e9
    assert "(MFU " in done_line(history, None)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    known = {name: getattr(history, name) for name in ("flops_per_second", "peak_memory_bytes", "commit")}
    known |= {"kind": "goodput", "seconds_compile": seconds["compile"], "command": command_line()}
    assert record.items() >= known.items()
    assert DistributedTrainingHistory.load(tmp_path / "history.json").mfu == history.mfu
    page = (tmp_path / "report.html").read_text()
    assert "(MFU)" in page
    assert "FLOP/s" in page
    assert "mfu" not in page  # no curve: a number of the whole run
    # A second run of the process has its own time alone; the steps that the end of the first lost count once.
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000012")
    fit(tmp_path)
    after = read(tmp_path / "goodput.json")
    assert (after["steps"], after["seconds"]["start"]) == (12, seconds["start"])
    assert after["seconds"]["restore"] == 0 < after["seconds"]["redone"]


def test_micro_batches_leave_the_work_of_a_sample_as_it_is():
    one, work = trainer(linen.Dense(3)), []
    for accumulation in (1, 2):
        plan = one.prepare(X, Y, config=config(gradient_accumulation_steps=accumulation, batch_size=8))
        work.append(device_use(plan, 1.0)["flops_per_sample"])
    # The update, of 21 parameters, counts once for half as many samples.
    assert work[0] < work[1] < 2 * work[0]


def test_the_work_is_that_of_each_process_s_steps_and_a_run_that_is_over_keeps_its_record(tmp_path):
    for batch in (16, 48, 48):
        history = fit(tmp_path, global_batch_size=batch, epochs=4 if batch == 16 else 8).history
    report = read(tmp_path / "goodput.json")
    assert (report["steps"], history.num_steps) == (12 + 4, 16)
    samples = 12 * 16 + 4 * 48
    assert report["flops"] == pytest.approx(samples * history.flops_per_sample, rel=0.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line.get("kind") == "goodput"]
    assert [line["step"] for line in kept] == [12, 16]
    assert history.peak_memory_bytes >= kept[-1]["peak_memory_bytes"]
    assert history.goodput == pytest.approx(kept[-1]["goodput"], rel=1e-2)  # not that of one more start
    report.pop("flops")  # as an earlier version wrote it
    (tmp_path / "goodput.json").write_text(json.dumps(report))
    assert fit(tmp_path, global_batch_size=48, epochs=9).history.num_steps == 17
    assert read(tmp_path / "goodput.json")["flops"] == pytest.approx(
        17 * 48 * history.flops_per_sample, rel=0.5
    )


def test_only_what_is_compiled_counts_as_compiling_also_in_later_epochs(tmp_path):
    slow = does(on_step=lambda self, info: time.sleep(0.02))
    fit(tmp_path, slow, evaluate_every_n_steps=1, checkpoint_every_n_steps=1, steps_per_dispatch=1)
    seconds = read(tmp_path / "goodput.json")["seconds"]
    assert seconds["step"] + seconds["input"] > 12 * 0.02


def test_a_batch_of_another_length_is_compiled_anew(tmp_path):
    batches = [(np.ones((8, n), int), np.zeros((8, n), int)) for n in (4, 4, 6, 6, 4, 6)]
    with mock.patch.object(loop, "report_progress", wraps=loop.report_progress) as reported:
        trainer(linen.Embed(5, 3)).fit(cx.data.Batches(batches), config(epochs=2, steps_per_dispatch=1))
    phases = [call.args[1] for call in reported.mock_calls]
    assert phases.count("compile") == 2  # both lengths, once each over the epochs


def test_a_loader_s_samples_have_the_work_of_those_of_arrays(tmp_path):
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 48, 16)]
    loader, arrays = fitted(data=[cx.data.Batches(batches)], run_dir=tmp_path / "loader"), fit(tmp_path / "x")
    # The program of arrays gathers its batch from those of several steps.
    assert loader.history.flops_per_sample == pytest.approx(arrays.history.flops_per_sample, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40", 0.0),  # not an L4
        ("TPU v5 lite", 197e12),
        ("cpu", 0.0),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_kind(kind, flops):
    assert devices.peak_flops(kind) == flops


def test_a_crash_costs_a_restart_and_the_steps_since_the_last_save(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(str(path)))
    monkeypatch.setattr(goodput, "_EVERY_S", 0.0)
    with pytest.raises(RuntimeError, match="lost"):
        fit(tmp_path, At(7, lose))
    assert not [name for name in synced if "goodput" in name]  # a step would wait for a save beside it
    before = read(tmp_path / "goodput.json")
    assert (before["ended"], before["step"]) == (False, 6)  # written before the hook that failed
    monkeypatch.setattr(heartbeat, "_reporter", heartbeat.Reporter())  # as in a new process
    fit(tmp_path)
    after = read(tmp_path / "goodput.json")
    assert after["steps"] == 12  # steps 5 and 6 were made twice and count once
    assert after["seconds"]["restart"] > 0
    assert after["seconds"]["restore"] > 0
    assert after["seconds"]["redone"] == pytest.approx(before["seconds"]["step"] / 3)


def test_a_start_without_a_step_after_a_crash_keeps_what_the_crash_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(goodput, "_EVERY_S", 0.0)
    with pytest.raises(RuntimeError, match="lost"):
        fit(tmp_path, At(7, lose))
    monkeypatch.setattr(heartbeat, "_reporter", heartbeat.Reporter())  # as in a new process
    fit(tmp_path, max_steps=4)  # it is at step 4 already
    after = read(tmp_path / "goodput.json")
    assert after["steps"] == 4
    assert after["seconds"]["redone"] > 0 < after["seconds"]["restart"]


def test_a_crash_soon_after_the_start_is_accounted_for(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="lost"):
        fit(tmp_path, At(1, lose))
    assert not read(tmp_path / "goodput.json")["ended"]
    monkeypatch.setattr(heartbeat, "_reporter", heartbeat.Reporter())  # as in a new process
    fit(tmp_path)
    assert read(tmp_path / "goodput.json")["seconds"]["restart"] > 0


WHOLE = '{"seconds": {}, "steps": 1, "step": 1, "at_unix_s": 1, "ended": true, "flops": "x"}'


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seconds": 3}', '{"seconds": {"step": "x"}}', WHOLE])
def test_a_damaged_file_is_as_good_as_none(tmp_path, text):
    (tmp_path / "goodput.json").write_text(text)
    assert read(tmp_path / "goodput.json") == {}
