"""A run records what it did: bad steps, samples per second, learning rates, settings, and its own records."""

import json
import time
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.config.experiment import TrainConfig
from cyxjax.data.batches import BatchPlan
from cyxjax.errors import ConfigError, NonFiniteError
from cyxjax.observe.events import read_events
from cyxjax.train.hooks import progress
from cyxjax.train.hooks.hook import EpochInfo, Position, RunState, StepInfo
from cyxjax.train.plan import total_steps
from tests.support.trainers import At, X, Y, config, fitted, loaded, run_experiment, trainer

pytestmark = pytest.mark.usefixtures("two_devices")
DATA = (X[:24], Y[:24])  # 3 steps of 8 samples
SAVING = {"checkpoint_every_n_epochs": 1, "verbose": False, "batch_size": 4, "epochs": 1}


def every_record(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def records(folder):
    """The records of steps in a run folder."""
    return [line for line in every_record(folder) if "batch" in line]


@pytest.mark.parametrize("policy", ["abort", "skip", "rollback"])
def test_a_batch_whose_labels_are_all_ignored_is_not_a_bad_step(policy, tmp_path):
    x, labels = DATA[0], DATA[1].copy()
    labels[8:16] = -100
    one = trainer(linen.Dense(3), cx.CrossEntropyLoss(ignore_index=-100))
    saving = {"run_dir": str(tmp_path), "checkpoint_every_n_steps": 1}
    history = one.fit(x, labels, config(on_nonfinite=policy, shuffle=False), **saving)
    assert (history.num_steps, history.skipped_steps, history.rollback_steps) == (6, 0, [])
    assert np.isfinite(history.train_losses).all()
    assert not list(tmp_path.glob("black_box*"))


def test_records_after_a_resume_are_those_of_an_uninterrupted_run(tmp_path):
    def trained(folder, *steps):
        for count in steps:
            cut = config(max_steps=count, epochs=4, log_every_n_batches=2, checkpoint_every_n_epochs=1)
            trainer(linen.Dense(3)).fit(*DATA, cut, run_dir=str(tmp_path / folder), batch_size=2)
        return [line | dict.fromkeys(times, 0) for line in records(tmp_path / folder)]

    times = ("samples_per_second", "total_time_seconds")
    assert trained("cut", 3, 5, 9, 24) == trained("whole", 24)


@pytest.mark.parametrize(("before", "after"), [("ab", "ba"), ("a", "ca"), ("bc", "c"), ("ca", "ab")])
def test_metrics_that_change_within_an_epoch_keep_their_own_numbers(before, after, tmp_path):
    def fit(folder, names, **options):
        # Each metric is a constant, so that the numbers of another one would show.
        metrics = {
            name: lambda output, target, of=name: jnp.full(len(target), float(ord(of))) for name in names
        }
        one = trainer(linen.Dense(3), metrics=cx.Metrics(metrics))
        options |= {"run_dir": str(tmp_path / folder), "batch_size": 2, "log_every_n_batches": 4}
        return one.fit(*DATA, config(epochs=1, checkpoint_every_n_epochs=1), **options)

    fit("cut", before, max_steps=2)
    history, whole = fit("cut", after), fit("whole", after)
    expected = {name: float(ord(name)) for name in after}
    assert {name: history.metrics[f"train_{name}"] for name in after} == {n: [v] for n, v in expected.items()}
    assert [{name: line[name] for name in after} for line in records(tmp_path / "cut")] == [expected]
    assert (history.train_losses, history.grad_norms) == (whole.train_losses, whole.grad_norms)


def test_samples_per_second_counts_samples_whatever_their_weight(tmp_path):
    loss = cx.CrossEntropyLoss(weight=[10.0, 10.0, 10.0], ignore_index=0)
    one = trainer(linen.Dense(3), loss)
    history = one.fit(*DATA, config(log_every_n_batches=2), run_dir=str(tmp_path))
    assert history.samples_per_second * history.total_time_seconds == pytest.approx(2 * 24)
    assert {line["samples_per_second"] > 0 for line in records(tmp_path)} == {True}


def test_a_rate_is_not_of_numbers_that_arrived_together_and_goes_on_over_epochs(monkeypatch):
    now, sink = 0.0, Mock()
    spent = lambda: {"step": 0.75 * now, "data": 0.25 * now, "eval": 9 * now}  # noqa: E731
    monkeypatch.setattr(progress.heartbeat, "spent", spent)
    metrics = Mock(num_training_rows=1, means=lambda sums: {"loss": 1.0})
    hook = progress.RecordHook(Mock(), sink, metrics, 1, lambda step: None, lambda: 9 * now)
    hook.on_start(RunState(Position(), None, None))
    for step in range(1, 13):  # four in each second
        now = 1.0 * -(-step // 4) + step * 1e-6
        epoch, before = divmod(step - 1, 3)
        place = Position(step, epoch, 8 * (before + 1), before + 1)
        hook.on_step(StepInfo(place, np.zeros((1, 2)), (0.0, 0.0)))
        if before == 2:
            hook.on_epoch(EpochInfo(Position(step, epoch + 1), {}, {}))
    logged = [one.args[0] for one in sink.log.mock_calls]
    rates = [one["samples_per_second"] for one in logged if "batch" in one]
    assert rates == pytest.approx([8.0] * 4 + [32.0] * 8, rel=1e-4)


def test_a_record_after_a_rollback_to_an_earlier_epoch_counts_its_own_steps():
    now, sink = 0.0, Mock()
    metrics = Mock(
        num_training_rows=1, means=lambda sums: {"loss": sums[0, 0]}, arranged=lambda sums, _: sums
    )
    hook = progress.RecordHook(Mock(), sink, metrics, 2, lambda step: None, lambda: now)
    step = lambda *at, loss: hook.on_step(StepInfo(Position(*at), np.full((1, 2), loss), (0.0, 0.0)))  # noqa: E731
    hook.on_start(RunState(Position(), None, None))
    step(1, 0, 8, 1, loss=1.0)
    saved, now = hook.state_dict(), 3.0
    hook.on_epoch(EpochInfo(Position(2, 1), {}, {}))
    hook.load_state_dict(saved)
    hook.on_start(RunState(Position(1, 1, 8, 1), None, None))  # at the samples after those of a bad step
    step(2, 1, 16, 2, loss=5.0)
    now = 4.0
    hook.on_epoch(EpochInfo(Position(2, 2), {}, {}))
    *_, record, epoch = (one.args[0] for one in sink.log.mock_calls)
    assert (record["loss"], epoch["seconds"]) == (5.0, 1.0)


@pytest.mark.parametrize(("epoch", "end"), [(BatchPlan(1000, 10), 22 + 12 + 100), (None, 22 + 78 + 100)])
def test_a_resume_with_smaller_batches_counts_the_steps_that_are_left(epoch, end):
    """22 steps of 40 samples were done: 120 samples are left of the epoch, or unknown ones of a loader's."""
    course, feed = Mock(max_steps=None, epochs=2), Mock(steps_per_epoch=100)
    plan = Mock(settings=Mock(course=course, reading=Mock(epoch=epoch)), feed=feed)
    assert total_steps(plan, Position(22, 0, 880, 22)) == end


def test_the_seconds_of_an_epoch_are_all_that_it_took_over_a_resume(tmp_path):
    for most in (2, 4):
        one = trainer(linen.Dense(3), callbacks=[At(1, lambda info: time.sleep(0.3))])
        cut = config(max_steps=most, epochs=2, checkpoint_every_n_epochs=1)
        one.fit(*DATA, cut, run_dir=str(tmp_path))
    (epoch,) = [line for line in every_record(tmp_path) if "seconds" in line]
    assert 0.3 < epoch["seconds"] <= epoch["total_time_seconds"]


def test_a_second_fit_records_the_rate_of_its_own_schedule_also_when_it_is_resumed(
    tmp_path, as_users_promote
):
    def halves(step):
        return 0.5**step

    one = trainer(linen.Dense(3))
    for folder in ("first", "second"):  # 3 steps each
        one.fit(*DATA, config(**SAVING, checkpoint_dir=str(tmp_path / folder)), schedule=halves)
        assert one.history.learning_rates == pytest.approx([0.1 * 0.5**2])
    more = config(**SAVING | {"epochs": 2}, checkpoint_dir=str(tmp_path / "second"), resume="auto")
    history = trainer(linen.Dense(3)).fit(*DATA, more, schedule=halves)
    assert history.learning_rates == pytest.approx([0.1 * 0.5**2, 0.1 * 0.5**5])


@pytest.mark.parametrize("ahead", [1, 2])
def test_only_the_step_of_a_bad_sample_is_left_out_and_the_recorded_rate_counts_updates(
    ahead, tmp_path, as_users_promote
):
    bad = X[:20].copy()  # steps of 8, 8 and 4 samples, which are padded to 8
    bad[1] = np.nan
    saving = SAVING | {"on_nonfinite": "skip", "shuffle": False, "steps_per_dispatch": ahead}
    for epochs in (1, 2):
        options = config(**saving | {"epochs": epochs}, checkpoint_dir=str(tmp_path), resume="auto")
        history = trainer(linen.Dense(3)).fit(bad, Y[:20], options, schedule=lambda step: 0.5**step)
    assert (history.num_steps, history.skipped_steps) == (6, 2)
    assert history.learning_rates == pytest.approx([0.1 * 0.5**1, 0.1 * 0.5**3])


def test_a_step_is_left_out_where_only_its_loss_is_infinite(as_users_promote):
    def loss(output, target):  # as cross entropy where the label's logit is masked
        return jnp.where(target == 9, jnp.inf, (output[:, 0] - target) ** 2)

    targets = np.where(np.arange(24) == 9, 9.0, 1.0).astype(np.float32)  # of the second of 3 steps
    options = config(**SAVING | {"on_nonfinite": "skip", "shuffle": False, "checkpoint_every_n_epochs": 0})
    history = trainer(linen.Dense(1), loss).fit(X[:24], targets, options)
    assert (history.num_steps, history.skipped_steps) == (3, 1)
    assert np.isfinite(history.train_losses[0])


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_that_ended_at_a_bad_sample_resumes_past_it(policy, tmp_path, as_users_promote):
    bad = X[:24].copy()
    bad[9] = np.nan  # of the second of 3 steps
    saving = SAVING | {"shuffle": False, "epochs": 2, "checkpoint_every_n_steps": 1, "resume": "auto"}

    def fit(policy, folder):
        one = trainer(linen.Dense(3))
        folder = str(tmp_path / folder)
        return one, one.fit(bad, Y[:24], config(on_nonfinite=policy, checkpoint_dir=folder, **saving))

    with pytest.raises(NonFiniteError):
        fit("abort", "resumed")
    (resumed, history), (whole, expected) = fit(policy, "resumed"), fit(policy, "whole")
    assert history.skipped_steps == expected.skipped_steps == 2 * (policy == "skip")
    assert len(history.rollback_steps) == len(expected.rollback_steps) == 2 * (policy == "rollback")
    assert history.learning_rates == expected.learning_rates
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), resumed.params, whole.params)


def test_a_program_s_run_stores_what_the_program_trains_with(tmp_path, capsys):
    fitted(**SAVING, run_dir=str(tmp_path))
    kept = read_manifest(step_folder(tmp_path / "checkpoints", 3)).meta["config"]
    assert (kept["optimizer"]["lr"], {"model", "data", "loss"} & kept.keys()) == (0.1, set())
    assert "<td>0.1</td>" in (tmp_path / "report.html").read_text()
    capsys.readouterr()
    with pytest.raises(ConfigError, match="lr.*5.0"):
        fitted(one=trainer(linen.Dense(3), lr=5.0), **SAVING, run_dir=str(tmp_path))
    assert "optimizer.lr was 0.1, is 5.0" in capsys.readouterr().err


def test_a_stored_run_is_trained_on_with_its_schedule_and_without_warnings(
    tmp_path, capsys, as_users_promote
):
    run_experiment(tmp_path, checkpoint_every_n_epochs=1, schedule={"name": "cosine"})
    run = cx.load_run(tmp_path)
    capsys.readouterr()
    more = TrainConfig(**{**run.config.resolved(), "run_dir": str(tmp_path / "more"), "epochs": 2})
    history = run.trainer.fit(run.data.train, run.data.val, config=more)
    assert "WARNING" not in capsys.readouterr().err
    assert run.trainer.plan.settings.step.rate.name == "cosine"
    assert (history.num_steps, run.step) == (2, 2)
    assert run.evaluate()["loss"] > 0  # step 2 is in another folder


def test_records_of_another_run_are_put_aside_when_a_loaded_state_is_trained_in_its_folder(tmp_path):
    fitted(**SAVING, checkpoint_dir=str(tmp_path / "loaded"))
    into = {"run_dir": str(tmp_path / "run"), "log_every_n_batches": 1}
    fitted(**SAVING, **into)
    one = loaded(tmp_path / "loaded", model=linen.Dense(3))
    one.fit(*DATA, **SAVING | {"epochs": 2}, **into)
    assert [line["step"] for line in records(tmp_path / "run")] == [4, 5, 6]
    assert (tmp_path / "run" / "metrics.jsonl.old").exists()
    assert [e["event"] for e in read_events(tmp_path / "run" / "events.jsonl")].count("start") == 1


def test_a_best_checkpoint_of_a_stream_holds_its_place(tmp_path):
    best = cx.BestCheckpoint(str(tmp_path / "best"), monitor="train_loss")
    stream = cx.data.Rows([(x, y) for x, y in zip(*DATA, strict=True)])
    fitted(best, data=(stream,), **SAVING | {"checkpoint_every_n_epochs": 0, "steps_per_epoch": 2})
    (step,) = list_steps(tmp_path / "best")
    assert "stream_places" in read_manifest(step_folder(tmp_path / "best", step)).meta


def test_a_run_that_starts_over_does_not_count_the_time_of_an_interrupted_one(tmp_path):
    run = {"run_dir": str(tmp_path), "resume": "never"}
    fitted(**SAVING, **run)
    left = json.loads((tmp_path / "goodput.json").read_text())
    left |= {"ended": False, "at_unix_s": time.time() - 86_400}
    (tmp_path / "goodput.json").write_text(json.dumps(left))
    events = [
        json.dumps(event) for event in read_events(tmp_path / "events.jsonl") if event["event"] != "end"
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(events) + "\n")
    fitted(**SAVING, **run)
    assert json.loads((tmp_path / "goodput.json").read_text())["seconds"]["restart"] == 0
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")].count("start") == 1


def test_groups_are_made_of_an_optimizer_at_the_rate_that_was_set():
    optimizer = cx.SGDOptimizer(0.1)
    optimizer.lr = 1.0
    grouped = cx.with_groups(optimizer, [{"match": "*/bias", "lr": 0.5}])
    params = {"Dense_0": {"kernel": np.ones(2, np.float32), "bias": np.ones(2, np.float32)}}
    updates, _ = grouped.update(params, grouped.init(params), params)
    assert (updates["Dense_0"]["kernel"][0], updates["Dense_0"]["bias"][0]) == (-1.0, -0.5)


@pytest.mark.parametrize(("values", "continues"), [({}, True), ({"resume": "never"}, False)])
def test_the_last_line_names_the_command_that_continues_the_run(values, continues, tmp_path, capsys):
    run_experiment(tmp_path, checkpoint_every_n_epochs=1, verbose=True, **values)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")]
    assert ("--epochs" in line) == continues


def test_a_run_that_is_over_keeps_the_configuration_it_was_trained_with(tmp_path):
    def files(lr=0.1, **other):
        settings = {"optimizer": {"name": "sgd", "lr": lr}, "checkpoint_every_n_epochs": 1, "report": True}
        run_experiment(tmp_path, **settings | other)
        return [(tmp_path / name).read_bytes() for name in ("config.yaml", "report.html")]

    first = files()
    assert first == files(log_every_n_batches=7)  # which trained nothing
    with pytest.raises(ConfigError, match="lr.*0.5"):
        files(0.5)
    assert first[0] == (tmp_path / "config.yaml").read_bytes()
    (tmp_path / "report.html").unlink()  # as if the run was killed before it was written
    assert files()[1]
