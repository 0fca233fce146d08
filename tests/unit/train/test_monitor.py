"""The monitored metric: found by name before training; the metric or `mode` defines the better value."""

import jax.numpy as jnp
import pytest

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps
from cyxjax.core.metrics import Metrics
from cyxjax.errors import ConfigError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.monitor import Monitor, Watchable
from tests.support.trainers import VAL, X, Y, config, loaded, run_experiment, trainer

pytestmark = pytest.mark.usefixtures("two_devices")

WRONG = (VAL[0], (VAL[1] + 1) % 3)  # wrong labels: learning makes a metric that is better when high fall


def margin(output, target):
    """Better when high, though its name is not an accuracy."""
    return jnp.take_along_axis(output, target[:, None], 1)[:, 0] - output.mean(1)


def metrics(**better):
    return Metrics({"margin": margin}, better=better)


def fitted(callback, data=WRONG, own=None, **values):
    one = trainer(callbacks=[callback], metrics=own or metrics(margin="max"))
    return one.fit(X, Y, *data, config(steps_per_dispatch=1, **values))


def test_values_stay_at_the_epochs_in_which_they_were_measured(tmp_path):
    values = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    values["steps_per_dispatch"] = 1
    for own, until in (
        (metrics(), {"epochs": 1}),
        (Metrics(), {"epochs": 3, "max_steps": 20}),
        (metrics(), {"epochs": 3}),
    ):
        history = trainer(metrics=own).fit(X, Y, *VAL, config(**values | until))
    rows = [{name for name in row if "margin" in name} for row in history.rows()]
    assert rows == [{"train_margin", "val_margin"}, set(), {"train_margin", "val_margin"}]
    monitor = Monitor("val_margin", "max")
    first, _, last = history.metrics["val_margin"]
    assert monitor.up_to(history, history.num_steps) == [first, last]
    assert monitor.is_best(history) == (last > first)


@pytest.mark.parametrize("source", ["metric", "mode"])
def test_the_best_by_a_metric_that_is_good_when_high_is_kept_also_by_a_resumed_run(tmp_path, source):
    # `margin` falls from epoch to epoch: the first is the best. Minimised, the last would be kept.
    own = metrics(margin="max") if source == "metric" else metrics()
    mode = "max" if source == "mode" else None
    path, folder = str(tmp_path / "best"), {"checkpoint_dir": str(tmp_path / "run")}
    for epochs, resume in ((2, "never"), (4, "must")):
        best = cx.BestCheckpoint(path, "val_margin", mode=mode)
        history = fitted(best, own=own, epochs=epochs, resume=resume, checkpoint_every_n_epochs=1, **folder)
    assert set(history.metrics) == {"train_margin", "val_margin"}
    margins = history.metrics["val_margin"]
    assert len(margins) == len(history.metrics["train_margin"]) == 4
    assert margins == sorted(margins, reverse=True)
    kept = loaded(path, metrics=own)
    assert kept.history.metrics["val_margin"] == margins[:1]
    assert kept.evaluate_metrics(*WRONG)["margin"] == pytest.approx(margins[0], rel=1e-5)


def test_each_experiment_keeps_its_best_in_its_own_folder(cwd):
    elsewhere = {"name": "BestCheckpoint", "options": {"path": str(cwd / "best")}}
    run_experiment(cwd / "run", callbacks=["BestCheckpoint", elsewhere])
    kept = [str(path.relative_to(cwd)) for path in cwd.rglob("step_*") if "checkpoints" not in path.parts]
    assert sorted(kept) == ["best/step_00000001", "run/best_model.pt/step_00000001"]


@pytest.mark.parametrize(("mode", "epochs"), [("max", 3), ("min", 6)])
def test_waiting_is_for_the_better_value(mode, epochs):
    history = fitted(cx.EarlyStopping(2, "val_margin", mode=mode), own=metrics(), epochs=6)
    assert len(history.train_losses) == epochs


def test_the_best_checkpoints_of_a_run_are_those_of_its_monitor(tmp_path):
    values = {"monitor": "val_margin", "checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1}
    fitted(cx.EarlyStopping(9), epochs=4, keep_last=1, keep_best=1, **values)
    steps = list_steps(tmp_path)
    assert steps == [steps[-1] // 4, steps[-1]]  # the first, which is the best, and the newest


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("val_loss mode=higher", "mode='higher'.*'max'"),
        ("val_los", "'val_los'.*'val_loss'"),
        ("val_acc", "'val_acc'.*'val_accuracy'"),
        ("margin", "'margin'.*'(val|train)_margin'"),
        ("top5", r"'top5'.*train_accuracy\W+train_loss\W+train_margin\W+val_accuracy"),
        ("val_margin", "'val_margin'.*mode='max'"),
    ],
)
def test_unknown_names_and_directions_are_refused(monitor, message):
    with pytest.raises(ConfigError, match=message):
        Watchable(metrics()).find(*monitor.split(" mode="))


@pytest.mark.parametrize("make", [cx.EarlyStopping, cx.ReduceLROnPlateau, cx.BestCheckpoint, None])
def test_what_is_not_measured_is_refused_before_anything_is_written(cwd, make):
    stops = {"checkpoint_every_n_epochs": 1, "early_stopping_patience": 2}
    for monitor, data, values, message in (
        ("val_los", VAL, {"early_stopping_patience": None}, "'val_los'.*'val_loss'"),
        ("val_loss", (), {}, "'val_loss'.*'train_loss'"),
        ("val_loss", VAL, {"evaluate_every_n_epochs": 0}, "'val_loss'.*evaluations"),
    ):
        callbacks, named = ([make(monitor=monitor)], {}) if make else ((), {"monitor": monitor})
        with pytest.raises(ConfigError, match=message):
            trainer(callbacks=callbacks).fit(X, Y, *data, config(**stops | named | values))
    assert not list(cwd.iterdir())
    assert len(trainer().fit(X, Y, config()).train_losses) == 2  # the default val_loss is not required


def test_values_of_a_course_that_was_left_behind_do_not_count():
    steps, losses = [5, 10, 15, 20, 12, 17, 12], [5.0, 4.0, 3.0, 2.0, 3.5, 2.5, 3.4]  # back to 10, to 12
    history = DistributedTrainingHistory(
        val_steps=steps, val_losses=losses, metrics={"val_f1": [None] * 5 + [0.1, 0.2]}
    )
    monitor = Monitor("val_loss", "min")
    assert monitor.up_to(history, 12) == [5.0, 4.0, 3.4]
    assert monitor.up_to(history, 10) == [5.0, 4.0]
    assert monitor.is_best(history)  # 3.4, where 2.0 and 2.5 were undone
    assert Monitor("val_f1", "max").up_to(history, 12) == [0.2]  # measured in the newest evaluations only
