"""A loss spike: detected by the median, rolled back together with its samples."""

import itertools
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import linen

from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.cli import audit
from cyxjax.core.losses import MSELoss
from cyxjax.core.optimizer import LearningRateFactor
from cyxjax.errors import CheckpointError, LossSpikeError
from cyxjax.files import read_json_lines
from cyxjax.launch import heartbeat
from cyxjax.observe.profile import read
from cyxjax.observe.report.facts import curves_of
from cyxjax.run_folder import RunFolder
from cyxjax.train import resume
from cyxjax.train.hooks import progress, saving
from cyxjax.train.hooks.bad_steps import LossSpikeHook
from cyxjax.train.hooks.callbacks import ReduceLROnPlateau
from cyxjax.train.hooks.hook import Position, RunState, StepInfo
from tests.support.trainers import At, does, lose, says, trainer

pytestmark = pytest.mark.usefixtures("two_devices")

BATCH, STEPS, BAD = 16, 20, 12  # samples a step, steps an epoch, the step (from 0) whose targets are wrong


def hook_after(losses, weight=4.0, **options):
    """The hook after `losses`, as steps 1, 2, ..."""
    hook = LossSpikeHook(**{"factor": 2.0, "window": 4, "steps": 2} | options)
    hook.on_start(RunState(Position(), None, None))
    for step, loss in enumerate(losses, 1):
        hook.on_step(StepInfo(Position(step, 0, step), np.array([[loss * weight, weight]]), (0.0, 0.0)))
    return hook


def test_a_spike_is_so_many_high_losses_in_a_row():
    # The median of 1, 2, 3, 4 is 2.5, so 5 is the least that is high.
    with pytest.raises(LossSpikeError, match=r"5 .*9 .*steps 5 .*6.* 2 x 2\.5") as caught:
        hook_after([1, 2, 3, 4, 5, 9])
    assert caught.value.position.step == 6
    assert caught.value.good_step == 3  # step 4's update may be what made step 5 high


@pytest.mark.parametrize(
    "losses",
    [
        [1, 2, 3, 4, 4.9, 4.9, 4.9],
        [1, 2, 3, 4, 9, 1, 9, 1, 9],  # never two in a row
        [1, 1, 9, 9, 9, 9],  # the window of four is full with the fourth loss, and then its median is 5
        [-1, -1, -1, -1, 9, 9, 9],  # a multiple of a negative median has no meaning
        [0, 0, 0, 0, 9, 9, 9],
    ],
)
def test_what_is_no_spike(losses):
    assert len(hook_after(losses)._high) < 2  # a second high loss in a row would have raised


def test_a_spike_goes_on_in_a_run_that_is_resumed_with_fewer_steps():
    hook = LossSpikeHook(2.0, 4, 2)
    hook.load_state_dict(hook_after([1, 1, 1, 1, 9, 9, 9], steps=5).state_dict())
    hook.on_start(RunState(Position(7), None, None))
    with pytest.raises(LossSpikeError, match="steps 5 to 8"):
        hook.on_step(StepInfo(Position(8, 0, 8), np.array([[9.0, 1.0]]), (0.0, 0.0)))


def test_high_losses_leave_the_median_alone_and_steps_left_out_have_none():
    hook_after([1, 1, 1, 1] + 20 * [9, 1])
    hook = hook_after([1, 1, 1, 1, 9])
    for step, sums in enumerate([np.zeros((1, 2)), np.array([[90.0, 1.0]])], 6):  # not finite, and finite
        hook.on_step(StepInfo(Position(step, 0, step), sums, (0.0, 0.0), left_out=True))
    with pytest.raises(LossSpikeError) as caught:
        hook.on_step(StepInfo(Position(7, 0, 7), np.array([[9.0, 1.0]]), (0.0, 0.0)))
    assert caught.value.good_step == 3


def test_a_rollback_forgets_the_streak_but_not_the_median():
    hook = hook_after([1, 1, 1, 1, 9])
    hook.on_start(RunState(Position(), None, None))
    high = StepInfo(Position(5, 0, 9), np.array([[9.0, 1.0]]), (0.0, 0.0))
    hook.on_step(high)
    with pytest.raises(LossSpikeError):
        hook.on_step(high)


def data(without=()):
    """A noisy line; the targets of batch BAD are 10^4 times too large. `without`: excluded batches."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 4)).astype(np.float32)
    y = (x.sum(1, keepdims=True) + rng.normal(size=(len(x), 1))).astype(np.float32)
    y[BAD * BATCH : (BAD + 1) * BATCH] *= 1e4
    kept = [b for b in range(STEPS) if b not in without]
    return tuple(a.reshape(STEPS, BATCH, -1)[kept].reshape(len(kept) * BATCH, -1) for a in (x, y))


def fit(folder, *callbacks, xy=None, **changes):
    one = trainer(linen.Dense(1), MSELoss(), 0.02, callbacks=callbacks)
    options = {
        "report": False,
        "epochs": 1,
        "global_batch_size": BATCH,
        "shuffle": False,
        "run_dir": str(folder),
        "checkpoint_every_n_steps": 2,
        "keep_last": 5,
        "on_loss_spike": "rollback",
        "loss_spike_window": 8,
    }
    one.fit(*(xy or data()), **options | changes)
    return one


def test_a_poisoned_batch_is_rolled_back_and_left_out(tmp_path, capsys, printed):
    # Steps count from 1: 13 to 15 are high, 12 may be the cause, so the checkpoint is of step 10.
    one = fit(tmp_path / "a", log_every_n_batches=3)
    shown = capsys.readouterr().out
    assert "in steps 13 to 15, usually" in shown
    assert f"step 10, continuing with the samples after sample {15 * BATCH} of epoch 1." in shown
    history = one.history
    assert (history.rollback_epochs, history.rollback_batches, history.rollback_steps) == ([0], [15], [5])
    assert history.rollback_samples == [15 * BATCH]
    assert (history.num_steps, math.isfinite(history.train_losses[0])) == (15, True)
    # without the steps that the rollback gave up
    assert json.loads((tmp_path / "a" / "goodput.json").read_text())["steps"] == 15
    curves = curves_of(read_json_lines(tmp_path / "a" / "metrics.jsonl"))
    assert [step for step, _ in curves["loss"]] == [3, 6, 9, 13]  # not 12 and 15 before the rollback to 10
    # As if the excluded samples had never existed (same bits: the same steps on the same batches).
    other = fit(tmp_path / "b", xy=data(without=range(10, 15)))
    assert not other.history.rollback_steps
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert history.train_losses == other.history.train_losses
    assert "steps 11 to 15: left out on purpose" in printed(audit.main, tmp_path / "a")


def test_a_rate_that_was_lowered_goes_back_with_the_state_also_in_a_run_that_is_resumed(tmp_path):
    x, y = data()

    def factors(epochs):
        plateau = ReduceLROnPlateau(factor=0.5, patience=1, min_delta=1e9)  # lowered at each evaluation
        of_run = {"xy": (x, y, x[:BATCH], y[:BATCH]), "evaluate_every_n_steps": 4, "epochs": epochs}
        one = fit(tmp_path, plateau, **of_run)
        parts = jax.tree.leaves(one.state.sync, is_leaf=lambda part: isinstance(part, LearningRateFactor))
        held = [float(part.factor) for part in parts if isinstance(part, LearningRateFactor)]
        return one.history.val_steps, plateau.learning_rate_factor(), held

    # Back to step 10; of 8, 12 and 15, as the first is the best.
    assert factors(1) == ([4, 8, 12, 12, 15], 0.5**3, [0.5**3])
    steps, believed, held = factors(2)  # which meets the bad batch again, at step 28
    assert steps[5:] == [16, 20, 24, 28, 28, 31]
    assert [believed] == held == [0.5**8]


def test_the_time_of_a_run_goes_on_over_a_rollback(tmp_path, monkeypatch):
    now_s, phases, load = [0.0], [], resume.load
    ticks = does(on_step=lambda self, info: now_s.append(now_s[-1] + 1))  # one second per step
    clock = SimpleNamespace(monotonic=lambda: now_s[-1])
    spied = lambda *of, **how: phases.append(heartbeat._reporter.last.phase) or load(*of, **how)  # noqa: E731
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(resume, "load", spied)
    history = fit(
        tmp_path, ticks, epochs=2, max_time=17, checkpoint_every_n_steps=5, steps_in_flight=1
    ).history
    # 14 steps (the bad one ends before its second), back to step 10, and on until more than 17 are done.
    assert (history.rollback_steps, history.stopped_by) == ([5], "max_time")
    assert phases == ["checkpoint"]  # at the rollback: no step that counts
    assert history.total_time_seconds == 14 + history.num_steps - 10 < 25


def test_a_stop_that_a_callback_asked_for_outlives_a_rollback(tmp_path):
    # A stop is requested after 14 steps; the rollback comes with step 15, before all ranks know.
    steps = itertools.count(1)
    asks = does(on_step=lambda self, info: next(steps) == 14)
    history = fit(tmp_path, asks, steps_per_dispatch=1).history
    assert (history.rollback_steps, history.stopped_by, history.num_steps) == ([5], "callback", 10)


def test_a_rollback_holds_one_state(tmp_path, monkeypatch):
    load, more = resume.load, []

    def counted(*of, **how):
        before = len(jax.live_arrays())
        found = load(*of, **how)
        more.append(len(jax.live_arrays()) - before)
        return found

    monkeypatch.setattr(resume, "load", counted)
    one = fit(tmp_path, says("on_start", lambda: one.params))
    assert one.history.rollback_steps == [5]
    assert more[-1] <= 0


def test_a_trace_under_way_goes_on_over_a_rollback(tmp_path, capsys):
    fit(tmp_path, profile="12:15")  # the rollback comes with the numbers of step 15
    folder = RunFolder(tmp_path).profile(0)
    assert "Profile of steps 12 to 14: 3 steps in " in capsys.readouterr().out
    assert len(list(folder.rglob("*.xplane.pb"))) == len(list(folder.rglob("perfetto_trace.json.gz"))) == 1
    (program,) = {op.program for op in read(folder) if "step" in op.program}
    assert program in (folder / "summary.txt").read_text()


def test_a_resumed_run_still_knows_what_was_left_out(tmp_path, capsys, printed):
    with pytest.raises(RuntimeError, match="lost"):
        # at step 13: three after the rollback to 10
        fit(tmp_path, At(18, lose, "step_in_epoch"), steps_in_flight=1)
    again = fit(tmp_path)
    assert f"Resuming from step 12 (epoch 1, sample {17 * BATCH})" in capsys.readouterr().out
    assert (again.history.rollback_batches, again.history.num_steps) == ([15], 15)
    assert "; 5 steps left out on purpose" in printed(audit.main, tmp_path)
    newest = max((tmp_path / "checkpoints").glob("step_*"))  # damaged: the one before it is looked at
    (newest / "MANIFEST.json").write_text("{")
    assert "; 5 steps left out on purpose" in printed(audit.main, tmp_path)


def test_a_resumed_run_sees_the_spike_that_an_unbroken_one_sees(tmp_path):
    # cut at step 12, a step before the first high loss: its own losses would not fill the window again
    with pytest.raises(RuntimeError, match="lost"):
        fit(tmp_path, At(12, lose), steps_in_flight=1)
    assert fit(tmp_path).history.rollback_steps == [5]


def test_an_exact_run_goes_back_to_what_its_schedule_saved(tmp_path, one_device):
    # step 11 is saved because the first start ends there; an unbroken run has steps 10 and 12 alone
    exact = {"reproducibility": "exact", "virtual_replicas": 1, "exact_threads": 8}
    fit(tmp_path / "cut", max_steps=11, **exact)
    again = fit(tmp_path / "cut", **exact)
    assert (again.history.rollback_batches, again.history.rollback_steps) == ([15], [5])


def test_a_run_that_is_not_exact_goes_back_to_the_newest(tmp_path):
    fit(tmp_path, max_steps=11)
    assert fit(tmp_path).history.rollback_steps == [4]


def test_a_spike_that_comes_back_is_an_error(tmp_path):
    # A second epoch has the same bad batch, but only one rollback is allowed.
    with pytest.raises(LossSpikeError, match="max_rollbacks=1 .*steps 28 .*30"):
        fit(tmp_path, epochs=2, max_rollbacks=1)


def test_without_a_checkpoint_from_before_nothing_is_set_aside(tmp_path):
    with pytest.raises(CheckpointError, match="step 11 .*keep_last") as refused:
        fit(tmp_path, keep_last=1, keep_best=0)
    assert str(refused.value).count("HINT") == 1
    names = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert len(names) == 1
    assert "abandoned" not in names[0]


def test_a_checkpoint_of_the_step_before_the_first_high_loss_is_better_than_none(tmp_path):
    one = fit(tmp_path, checkpoint_every_n_steps=4, keep_last=1, keep_best=0)  # of step 12; 13 to 15 are high
    assert one.history.rollback_steps == [3]


def test_a_step_after_a_rollback_has_no_value_of_the_step_left_behind(tmp_path):
    # Steps 13 to 15 are high; 14 was the end of an epoch and evaluated, and is then within the next one.
    one = fit(tmp_path, xy=data(without=range(BAD + 2, STEPS)) * 2, epochs=2, max_steps=16)
    assert (one.history.val_steps, one.history.rollback_steps) == ([14], [5])
    assert read_manifest(step_folder(tmp_path / "checkpoints", 14)).metric is None


def test_an_epoch_of_which_a_rollback_leaves_no_step_has_no_mean(tmp_path):
    x, y = data(without=range(BAD + 1, STEPS))  # the bad batch is the epoch's last
    calm = np.where(abs(y) > 100, y / 1e4, y)
    by_epochs = {"checkpoint_every_n_steps": 0, "checkpoint_every_n_epochs": 1, "loss_spike_factor": 1e3}
    fit(tmp_path, xy=(x, calm), epochs=1, loss_spike_steps=1, **by_epochs)
    one = fit(tmp_path, xy=(x, y), epochs=2, loss_spike_steps=1, **by_epochs)
    assert (one.history.rollback_steps, one.history.num_steps) == ([BAD + 1], BAD + 1)
    assert np.isnan(one.history.train_losses).tolist() == [False, True]


def test_epochs_whose_steps_are_all_left_out_have_no_mean(tmp_path):
    x, y = data()
    x[3] = np.nan
    one = fit(tmp_path, xy=(x[:BATCH], y[:BATCH]), epochs=3, on_nonfinite="skip", on_loss_spike="ignore")
    assert one.history.skipped_steps == 3
    assert np.isnan(one.history.train_losses).tolist() == [True] * 3
