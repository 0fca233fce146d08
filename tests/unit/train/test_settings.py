"""A configuration is split once into frozen parts; one of them has all that compiled functions depend on."""

import math
import shutil
from functools import partial

import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.sections import ScheduleConfig
from cyxjax.data.batches import BatchPlan
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError
from cyxjax.train.schedules import DECAY, Resumed, build_schedule, decay_of
from cyxjax.train.settings import BatchShape, resolve
from tests.support.resuming import kept
from tests.support.shared_programs import build
from tests.support.trainers import X, Y, config, does, loaded, mlp, same_bits, says, trainer

COSINE = ScheduleConfig(name="cosine", final_fraction=0.1)


def test_a_global_batch_is_dealt_out_to_replicas_or_to_the_parts_of_an_exact_step():
    # 96 samples = 3 replicas x 2 micro-batches x 16, or 8 parts x 12
    plain = DistributedTrainingConfig(global_batch_size=96, gradient_accumulation_steps=2)
    assert resolve(plain, 3).step.batch == BatchShape(16, 3, 2)
    exact = DistributedTrainingConfig(global_batch_size=96, reproducibility="exact")
    assert resolve(exact, 3).step.batch == BatchShape(12, 8, 1)


@pytest.mark.parametrize(("max_steps", "steps"), [(None, 17), (10, 6), (1000, 17)])
def test_a_decay_ends_where_the_run_does(max_steps, steps):
    # 100 samples in batches of 8 x 2: 7 steps an epoch, 3 epochs, of which 4 warm up
    one = DistributedTrainingConfig(batch_size=8, epochs=3, warmup_steps=4, max_steps=max_steps)
    assert resolve(one, 2, 100, schedule=COSINE).step.rate.decay[:2] == (4, steps)


def stop_at(step):
    """A callback that stops the training at `step`, or at the next step that is seen."""
    return does(on_step=lambda self, info: info.position.step >= step)


@pytest.mark.usefixtures("one_device", "as_users_promote")
@pytest.mark.parametrize(("name", "warmup_steps"), [("cosine", 0), ("linear", 0), ("linear", 6)])
def test_a_decay_goes_on_where_it_was_with_another_batch_size_and_ends_at_the_end(
    tmp_path, name, warmup_steps
):
    def rates(folder, *starts):
        soon = {"steps_per_dispatch": 1, "steps_in_flight": 1, "warmup_steps": warmup_steps}
        for batch_size, stop in starts:
            stopped = trainer(linen.Dense(3), callbacks=[stop_at(stop)])
            settings = config(epochs=4, batch_size=batch_size, **soon, **kept(tmp_path / folder))
            history = stopped.fit(X, Y, settings, schedule=ScheduleConfig(name=name))
            stops.append(history.num_steps)
        return history.learning_rates

    stops = []
    changed = rates("changed", (6, 11), (20, 99))
    # 10 steps an epoch, then 3. An epoch's last rate is that of the step before its end.
    step, all_steps = stops
    done, left = (step - warmup_steps) / (40 - warmup_steps), all_steps - step
    parts = [(9 - warmup_steps) / (40 - warmup_steps), *(1 - (1 - done) * rest / left for rest in (7, 4, 1))]
    shape = {"linear": lambda part: 1 - part, "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2}[name]
    assert changed == pytest.approx([0.1 * shape(part) for part in parts], rel=1e-5)
    assert rates("again", (6, 11), (20, 17), (20, 99)) == changed


@pytest.mark.usefixtures("one_device", "as_users_promote")
def test_a_decay_goes_on_as_it_was_where_a_rollback_has_set_the_steps_back(tmp_path):
    """The run then has fewer steps than its epochs, as it has after a change of the batch size."""
    bad = X.copy()
    bad[9] = np.nan
    options = {"on_nonfinite": "rollback", "max_rollbacks": 9, "batch_size": 6, "epochs": 3, "resume": "auto"}

    def trained(folder, *stops):
        for stop in stops:
            one = trainer(linen.Dense(3), callbacks=[stop_at(stop)])
            saving = {"checkpoint_dir": str(tmp_path / folder), "checkpoint_every_n_steps": 2}
            one.fit(bad, Y, config(**options, **saving), schedule=ScheduleConfig(name="cosine"))
        assert one.history.rollback_steps
        return one

    whole, resumed = trained("whole", 99), trained("cut", 12, 99)
    assert resumed.history.learning_rates == whole.history.learning_rates
    assert same_bits(resumed.params, whole.params)


def linear(samples, resumed=None, **values):
    """The plan of a linear decay over `samples`, 4 epochs in batches of 6."""
    settings = DistributedTrainingConfig(**{"epochs": 4, "batch_size": 6} | values)
    return resolve(settings, 1, samples, schedule=ScheduleConfig(name="linear"), resumed=resumed).step.rate


@pytest.mark.parametrize("cut", [(12, 1, 12), (20, 2, 0), (5, 0, 30)])
@pytest.mark.parametrize("batch_size", [3, 12, 24])
def test_a_decay_after_a_warmup_does_not_jump_at_another_batch_size_and_ends_with_the_epochs(cut, batch_size):
    """10 steps in each of 4 epochs, of which the warm-up takes 8; then another number of steps."""
    plan = partial(linear, 60, warmup_steps=8)
    before, (step, epochs, samples) = plan(), cut
    after = plan(Resumed(*cut, before.decay), batch_size=batch_size)
    old, new, num_steps = build_schedule(before), build_schedule(after), -(-60 // batch_size)
    end = step + (3 - epochs) * num_steps + -(-(60 - samples) // batch_size)
    assert float(new(step)) == pytest.approx(float(old(step)), rel=1e-5)
    assert float(new(end)) == pytest.approx(0, abs=1e-6)
    assert float(new(end - 1)) == pytest.approx(1 / after.decay.steps, rel=1e-4)
    # Stopped again, also after a rollback to earlier steps, or a change of the batch back: it goes on so.
    later = Resumed(end - num_steps - 2, 3, 0, after.decay)
    assert plan(later, batch_size=batch_size) == after
    back = build_schedule(plan(later))
    assert float(back(later.steps)) == pytest.approx(float(new(later.steps)), rel=1e-5)
    assert float(back(later.steps + 10)) == pytest.approx(0, abs=1e-6)


LONG = linear(60, Resumed(12, 1, 12, linear(60).decay), batch_size=20)  # a decay whose batch has changed


@pytest.mark.parametrize(
    ("was", "at", "samples", "now"),
    [
        (None, (12, 1, 12), 60, {"batch_size": 20}),  # of an earlier version, or a constant rate before
        (None, (12, 1, 12), 60, {"batch_size": 3}),
        (linear(60, max_steps=15), (15, 1, 30), 60, {"batch_size": 20}),
        (linear(60, max_steps=20), (10, 1, 0), 60, {"batch_size": 20, "max_steps": 20}),
        (linear(60, max_steps=20), (10, 1, 0), 60, {"batch_size": 3, "max_steps": 20}),
        (LONG, (16, 2, 20), 60, {"batch_size": 20, "max_steps": 1000}),
        (LONG, (16, 2, 20), 60, {"batch_size": 20, "warmup_steps": 1}),
        (linear(60), (20, 2, 0), 120, {}),
        (linear(60), (20, 2, 0), 20, {}),
        (linear(60, batch_size=8), (12, 1, 32), 60, {"batch_size": 8, "drop_last": True}),
    ],
)
def test_a_decay_of_a_resumed_run_ends_with_it_whatever_has_changed(was, at, samples, now):
    resumed = Resumed(*at, was and was.decay)
    plan = linear(samples, resumed, **now)
    epoch = BatchPlan(samples, now.get("batch_size", 6), drop_last="drop_last" in now)
    end = min(at[0] + resumed.steps_left(epoch, 4), now.get("max_steps", math.inf))
    rates = [float(build_schedule(plan)(step)) for step in range(at[0], end + 1)]
    assert rates[-1] == pytest.approx(0, abs=1e-5)
    assert rates == pytest.approx(np.linspace(rates[0], 0, len(rates)), abs=1e-5)
    if was and "warmup_steps" not in now and was.decay.made_for[3] == now.get("max_steps", 0):
        assert rates[0] == pytest.approx(float(build_schedule(was)(at[0])), rel=1e-5)
    assert rates[0] > 0.2


@pytest.mark.usefixtures("one_device", "as_users_promote")
def test_a_checkpoint_that_is_loaded_and_saved_keeps_the_decay_and_a_damaged_one_is_passed_over(tmp_path):
    for stop, size in ((11, 6), (14, 20)):
        one = trainer(linen.Dense(3), callbacks=[stop_at(stop)])
        saving = config(epochs=4, batch_size=size, **kept(tmp_path / "run"))
        one.fit(X, Y, saving, schedule=ScheduleConfig(name="linear"))
    loaded(tmp_path / "run", model=linen.Dense(3)).save_checkpoint(str(tmp_path / "copy"))
    run, copy = (Checkpointer(tmp_path / name).newest_manifest().meta for name in ("run", "copy"))
    assert decay_of(copy[DECAY]) == decay_of(run[DECAY]) == one.plan.settings.step.rate.decay


@pytest.mark.usefixtures("one_device")
def test_the_decay_goes_on_from_the_step_that_is_restored_where_a_newer_one_is_damaged(tmp_path):
    def decay(folder, **values):
        one = trainer(linen.Dense(3), callbacks=[stop_at(16)])
        saving = kept(tmp_path / folder) | {"checkpoint_every_n_steps": 5}
        one.fit(X, Y, config(epochs=4, **values, **saving), schedule=ScheduleConfig(name="linear"))
        return one.plan.settings.step.rate.decay

    decay("run", batch_size=6)
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    newest, *older = list_steps(tmp_path / "run")[::-1]
    shutil.rmtree(step_folder(tmp_path / "older", newest))
    arrays = next(step_folder(tmp_path / "run", newest).rglob("*.safetensors"))
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"?")
    assert older
    assert decay("run", batch_size=20) == decay("older", batch_size=20)


def test_a_decay_of_other_epochs_or_max_steps_is_that_of_a_run_that_had_them_from_the_beginning():
    def decay(epochs, resumed=None, **values):
        settings = DistributedTrainingConfig(epochs=epochs, batch_size=6, warmup_steps=8, **values)
        return resolve(settings, 1, 60, schedule=COSINE, resumed=resumed).step.rate.decay

    assert decay(6, Resumed(40, 4, 0, decay(4)))[:2] == decay(6)[:2] == (8, 52)
    assert decay(6, Resumed(30, 3, 0, decay(4)), max_steps=35)[:2] == (8, 27)
    assert decay(6, Resumed(30, 3, 0, decay(4, max_steps=35)))[:2] == (8, 52)
    # Within an epoch with a short last batch, also of an earlier version, whose decay is not known.
    uneven = linear(64, batch_size=20, max_steps=6)
    for before in (uneven, linear(64, batch_size=20), None):
        at = Resumed(6, 1, 40, before and before.decay)
        assert linear(64, at, batch_size=20).decay[:2] == (0, 16)
        assert linear(64, at, batch_size=20, epochs=9).decay[:2] == (0, 36)
    # A rollback set the steps back, so that the epochs end first now.
    assert decay(4, Resumed(20, 3, 0, decay(4, max_steps=35)), max_steps=35)[:2] == (8, 27)


@pytest.mark.parametrize(
    ("values", "schedule", "steps"),
    [
        ({}, COSINE.model_copy(update={"decay_steps": 9}), 9),
        ({"steps_per_epoch": 7, "epochs": 3}, COSINE, 21),
        ({"steps_per_epoch": 7, "epochs": 3, "max_steps": 12}, COSINE, 12),
    ],
)
def test_a_decay_over_a_loader_needs_a_number_of_steps(values, schedule, steps):
    """A loader has no known number of steps: the rate used to be at its end after one step."""
    assert resolve(DistributedTrainingConfig(**values), 2, schedule=schedule).step.rate.decay.steps == steps
    with pytest.raises(ConfigError, match=r"schedule\.name=cosine: .*loader.*decay_steps .*max_steps"):
        resolve(DistributedTrainingConfig(), 2, schedule=COSINE)


def test_a_rate_that_does_not_decay_hangs_on_no_number_of_steps():
    # or the same functions would be compiled again for a longer fit
    short, long = (DistributedTrainingConfig(epochs=n) for n in (1, 9))
    assert resolve(short, 2, 640).step == resolve(long, 2, 6400).step
    assert resolve(short, 2, 640, schedule=COSINE).step != resolve(long, 2, 640, schedule=COSINE).step


def test_what_the_caller_changes_later_is_not_changed_here():
    one = DistributedTrainingConfig(comm="bucketed", comm_options={"bucket_size_mb": 25})
    before = resolve(one, 2).step
    one.comm_options["bucket_size_mb"] = 1
    assert before.comm_options == {"bucket_size_mb": 25}
    assert resolve(one, 2).step != before


@pytest.mark.parametrize("model", [mlp, partial(linen.Dense, 3)])
def test_equal_trainers_share_them_in_these_tests(model, two_devices):
    """Compiled anew for each trainer, the tests take a third longer, and nothing else would say so."""
    steps, metrics = [], {"first": lambda output, target: output[:, 0]}
    for callbacks in ((cx.EMA(),), (cx.EMA(), says("on_step", False))):
        one = trainer(model(), callbacks=callbacks, metrics=metrics)
        one.prepare(X, Y, config=config())
        steps.append(one.program.train_step)
    assert steps[0] is steps[1]


def first(output, target, column=0):
    return output[:, column]


SECOND = partial(first, column=1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"metrics": {"a": SECOND, "b": first}}, {"metrics": {"a": first, "b": SECOND}}),
        ({"callbacks": [cx.EMA(0.9)]}, {"callbacks": [cx.EMA(0.99)]}),
        ({"callbacks": [cx.ReduceLROnPlateau(0.5, monitor="train_loss")]}, {}),
        ({"lr": 0.1}, {"lr": 0.2}),
        ({"loss": cx.CrossEntropyLoss()}, {"loss": cx.CrossEntropyLoss(label_smoothing=0.1)}),
        ({"optimizer": cx.SGDOptimizer(0.1)}, {"optimizer": cx.SGDOptimizer(0.1, momentum=0.9)}),
    ],
)
def test_trainers_that_differ_share_none(one, other, two_devices):
    steps = []
    for options in (one, other):
        recipe, mesh = trainer(mlp(), **options).recipe, process_group.ensure().mesh
        steps.append(build(recipe, resolve(config(), 2).step, mesh, inputs=X[:1]).train_step)
    assert steps[0] is not steps[1]


def test_only_an_experiment_can_be_run_again():
    assert resolve(DistributedTrainingConfig(), 1).experiment is None
    assert resolve(TrainConfig(), 1).experiment is None  # of a program
    assert "name: mlp" in str(resolve(TrainConfig(), 1, named=True).experiment)
