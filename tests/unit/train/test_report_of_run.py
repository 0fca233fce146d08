"""An experiment leaves a report, events tell its course, off is off, and nothing of it can break a run."""

import json

import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.cli import main
from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.distributed import process_group
from cyxjax.errors import CheckpointError, NonFiniteError
from cyxjax.observe.events import read_events
from cyxjax.train import experiment, reporting
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.trainer import DistributedTrainer

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 4)).astype(np.float32), RNG.integers(0, 3, 48).astype(np.int32)


def train(folder, **values):
    process_group.finalize()  # an experiment makes its own
    try:
        small = {
            "epochs": 1,
            "batch_size": 256,
            "model": {"options": {"hidden": [8]}},
            "optimizer": {"name": "sgd", "lr": 0.1},
        }
        return experiment.run(TrainConfig(run_dir=str(folder), **small | values))
    finally:
        process_group.finalize()


def names(folder):
    return [event["event"] for event in read_events(folder / "events.jsonl")]


def test_an_experiment_leaves_its_report(tmp_path, capsys):
    assert train(tmp_path / "run", checkpoint_every_n_epochs=1) == 0
    assert names(tmp_path / "run") == ["start", "save", "end", "test", "predictions", "samples"]
    start, *_, predictions, samples = read_events(tmp_path / "run" / "events.jsonl")
    assert len(samples["images"]) == 24
    wrong = [item for item in samples["images"] if not item["right"]]
    assert len(wrong) == 12  # of a small model after one epoch: those it is surest of come first
    assert all(", taken for " in item["caption"] for item in wrong)
    assert start["world_size"] == 1
    assert start["environment"]["jax"]
    assert "python" in start["environment"]["command"]
    assert start["fingerprint"]["training data"]
    assert np.sum(predictions["confusion"]) == 359  # all test samples: fewer than report_samples
    text = (tmp_path / "run" / "report.html").read_text()
    for part in (
        "Finished: 1 epoch,",
        "test accuracy",
        "Where the time went",
        "359 test samples",
        "Passed: ",
    ):
        assert part in text
    assert "WARNING" not in capsys.readouterr().out
    folder = TrainConfig(run_dir=str(tmp_path / "run")).run_folder
    later = reporting.audit_of(folder, most_samples=100)  # others wait for it
    assert later.good is None
    assert "cyxjax audit" in later.lines[0]

    def told(*words):
        assert main.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run = str(tmp_path / "run")
    audited = told("audit", run)
    assert audited["good"] is True
    assert audited["findings"] == []
    assert "every sample came once" in audited["summary"]
    assert told("checkpoint", "ls", run)[0]["step"] == 1  # 8 replicas take all samples at once
    assert told("checkpoint", "verify", run) == [{"step": 1, "good": True, "problems": []}]
    assert told("hash", run)["steps"][0]["step"] == 1
    assert told("hash", run, run)["equal"] is True


def test_report_off_writes_nothing_of_it(tmp_path):
    assert train(tmp_path / "run", report=False) == 0
    assert not {"events.jsonl", "report.html"} & {path.name for path in (tmp_path / "run").iterdir()}
    assert train(tmp_path / "other", report_samples=0) == 0
    assert "predictions" not in names(tmp_path / "other")


def test_a_report_that_fails_costs_one_line(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise MemoryError("no room\nat all")

    monkeypatch.setattr("cyxjax.observe.report.page.write", fail)
    assert train(tmp_path / "run") == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert "report.html was not drawn: MemoryError: no room" in warnings[0]


def test_a_rollback_is_told_in_the_log_of_the_same_start(tmp_path):
    class Spoil(Hook):
        spoiled = False

        def on_step(self, info):
            if info.position.step == 5 and not Spoil.spoiled:
                Spoil.spoiled = True
                raise NonFiniteError("planted", info.position)

    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1), callbacks=[Spoil()])
    config = TrainConfig(
        epochs=4, global_batch_size=16, run_dir=str(tmp_path), checkpoint_every_n_epochs=1,
        on_nonfinite="rollback", checkpoint_dir=str(tmp_path / "checkpoints"), steps_in_flight=1,
    )  # fmt: skip
    trainer.fit(X, Y, config)
    told = [(event["event"], event["step"]) for event in read_events(tmp_path / "events.jsonl")]
    assert told == [("start", 0), ("save", 3), ("rollback", 3), *told[3:-1], ("end", told[-1][1])]
    assert {name for name, _ in told[3:-1]} == {"save"}


def test_a_fit_that_is_refused_changes_nothing_of_its_run_folder_and_one_that_breaks_is_recorded(tmp_path):
    class Break(Hook):
        def on_epoch(self, info):
            raise ZeroDivisionError

    def fit(width, *callbacks):
        layers = linen.Sequential([linen.Dense(width), linen.Dense(3)])
        trainer = DistributedTrainer(layers, CrossEntropyLoss(), optax.sgd(0.1), callbacks=list(callbacks))
        trainer.fit(X, Y, epochs=2, global_batch_size=16, run_dir=str(tmp_path), verbose=False)

    def files():  # but for the lock, which names the last start
        found = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "run.lock"]
        return {path: path.read_bytes() for path in found}

    with pytest.raises(ZeroDivisionError):
        fit(8, Break())
    assert json.loads((tmp_path / "history.json").read_text())["epochs"] == [0]
    fit(8)
    before = files()
    with pytest.raises(CheckpointError, match="layers_0/kernel"):
        fit(9)
    assert files() == before
