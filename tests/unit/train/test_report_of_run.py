"""An experiment writes a report and events, unless disabled, and no fault of them can break a run."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from flax import linen

from cyxjax.cli import main
from cyxjax.config.experiment import TrainConfig
from cyxjax.errors import NonFiniteError
from cyxjax.observe.events import read_events
from cyxjax.train import reporting
from tests.support.trainers import At, X, Y, fitted, run_experiment, trainer

pytestmark = pytest.mark.usefixtures("two_devices")


def names(folder):
    return [event["event"] for event in read_events(folder / "events.jsonl")]


def test_an_experiment_leaves_its_report(tmp_path, capsys, printed):
    run = tmp_path / "run"
    digits = {"model": {"name": "mlp", "options": {"hidden": [8]}}, "data": {"name": "digits"}}
    run_experiment(run, checkpoint_every_n_epochs=1, batch_size=256, report=True, **digits)
    assert names(run) == ["start", "save", "end", "test", "predictions", "samples"]
    start, *_, predictions, samples = read_events(run / "events.jsonl")
    assert len(samples["images"]) == 24
    wrong = [item for item in samples["images"] if not item["right"]]
    assert len(wrong) == 12  # of a small model after one epoch: those it is surest of come first
    assert all(", taken for " in item["caption"] for item in wrong)
    assert start["world_size"] == 1
    assert "python" in start["environment"]["command"]
    assert start["fingerprint"]["training data"]
    assert np.sum(predictions["confusion"]) == 359  # all test samples: fewer than report_samples
    text = (run / "report.html").read_text()
    for part in (
        "Finished: 1 epoch,",
        "test accuracy",
        "Where the time went",
        "359 test samples",
        "Passed: ",
    ):
        assert part in text
    assert "WARNING" not in capsys.readouterr().out
    later = reporting.audit_of(TrainConfig(run_dir=str(run)).run_folder, most_samples=100)
    assert later.good is None  # others wait for it
    assert "cyxjax audit" in later.lines[0]
    audited = json.loads(printed(main.main, "audit", run, "--json"))
    assert (audited["good"], audited["findings"]) == (True, [])


def test_report_off_writes_nothing_of_it(tmp_path):
    run_experiment(tmp_path / "run", report=False)
    assert not {"events.jsonl", "report.html"} & {path.name for path in (tmp_path / "run").iterdir()}
    run_experiment(tmp_path / "other", report=True, report_samples=0)
    assert "predictions" not in names(tmp_path / "other")


def test_a_report_that_fails_costs_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cyxjax.observe.report.page.page", Mock(side_effect=MemoryError("no room\nat all")))
    run_experiment(tmp_path / "run", report=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert "report.html was not written: MemoryError: no room" in line


def test_what_is_set_while_a_fit_runs_counts_from_the_next(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "run"), epochs=2, checkpoint_every_n_epochs=1)
    config.batch_size = 4

    def act(info):
        config.report, config.epochs = False, 9

    one = trainer(linen.Dense(3), callbacks=[At(3, act)])
    assert one.fit(X[:24], Y[:24], config).epochs == [0, 1]
    assert (tmp_path / "run" / "report.html").exists()


def raising(error):
    """A callback that raises `error` at the first step of the second epoch, once."""

    def act(info):
        raise error("planted", info.position)

    return At(4, act)


def test_a_rollback_and_an_error_are_recorded_with_the_epochs_before_them(tmp_path):
    kept = {"checkpoint_every_n_epochs": 1, "steps_in_flight": 1, "epochs": 4, "steps_per_dispatch": 1}
    with pytest.raises(ZeroDivisionError):
        fitted(raising(ZeroDivisionError), run_dir=str(tmp_path / "a"), **kept)
    assert json.loads((tmp_path / "a" / "history.json").read_text())["epochs"] == [0]
    fitted(raising(NonFiniteError), run_dir=str(tmp_path / "b"), on_nonfinite="rollback", **kept)
    events = [(event["event"], event["step"]) for event in read_events(tmp_path / "b" / "events.jsonl")]
    assert events == [("start", 0), ("save", 3), ("rollback", 3), *events[3:-1], ("end", events[-1][1])]
    assert {name for name, _ in events[3:-1]} == {"save"}
