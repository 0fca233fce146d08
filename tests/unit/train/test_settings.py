"""A configuration is split once into frozen parts; one of them has all that compiled functions depend on."""

from functools import partial

import pytest
from flax import linen

import cyxjax as cx
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.sections import ScheduleConfig
from cyxjax.data.batches import BatchPlan
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.schedules import Resumed, build_schedule
from cyxjax.train.settings import BatchShape, RatePlan, resolve
from tests.support.resuming import kept
from tests.support.shared_programs import build
from tests.support.trainers import X, Y, config, mlp, says, trainer

COSINE = ScheduleConfig(name="cosine", final_fraction=0.1)


def test_a_global_batch_is_dealt_out_to_replicas_or_to_the_parts_of_an_exact_step():
    # 96 samples = 3 replicas x 2 micro-batches x 16, or 8 parts x 12
    plain = DistributedTrainingConfig(global_batch_size=96, gradient_accumulation_steps=2)
    assert resolve(plain, 3).step.batch == BatchShape(16, 3, 2)
    with pytest.raises(ConfigError, match="global_batch_size=96 .*5 replicas x 2"):
        resolve(plain, 5)
    exact = DistributedTrainingConfig(global_batch_size=96, reproducibility="exact")
    assert resolve(exact, 3).step.batch == BatchShape(12, 8, 1)


def test_a_decay_ends_where_the_run_does():
    # 100 samples in batches of 8 x 2: 7 steps an epoch, 3 epochs, of which 4 warm up
    one = DistributedTrainingConfig(batch_size=8, epochs=3, warmup_steps=4)
    assert resolve(one, 2, 100, schedule=COSINE).step.rate == RatePlan(
        "cosine", 1.0, 4, 17, 0.1, decay_begins=4, warmup_epochs=4 / 7
    )
    one.max_steps = 10
    assert resolve(one, 2, 100, schedule=COSINE).step.rate.decay_steps == 6
    one.max_steps = 1000
    assert resolve(one, 2, 100, schedule=COSINE).step.rate.decay_steps == 17


class StopAt(cx.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, info):
        return info.position.step >= self.step


@pytest.mark.usefixtures("one_device", "as_users_promote")
@pytest.mark.parametrize(("name", "warmup_steps"), [("cosine", 0), ("linear", 0), ("linear", 6)])
def test_a_decay_goes_on_where_it_was_with_another_batch_size_and_ends_at_the_end(
    tmp_path, name, warmup_steps
):
    def rates(folder, *starts):
        soon = {"steps_per_dispatch": 1, "steps_in_flight": 1, "warmup_steps": warmup_steps}
        for batch_size, stop in starts:
            stopped = trainer(linen.Dense(3), callbacks=[StopAt(stop)])
            settings = config(epochs=4, batch_size=batch_size, **soon, **kept(tmp_path / folder))
            history = stopped.fit(X, Y, settings, schedule=ScheduleConfig(name=name))
        return history.learning_rates

    # 10 steps an epoch, then 3: each has the rates of a run that had its batch size from the beginning. The
    # warm-up took 0.6 epochs, or 2 of the 12 steps that the run would have had: it decays over 10.
    changed, begun = rates("changed", (6, 11), (20, 99)), rates("small", (6, 99))[:1]
    expected = begun + ([0.07, 0.04, 0.01] if warmup_steps else rates("large", (20, 99))[1:])
    assert changed == pytest.approx(expected)
    assert rates("again", (6, 11), (20, 17), (20, 99)) == changed


@pytest.mark.parametrize("cut", [(12, 1, 12), (20, 2, 0), (5, 0, 30)])
@pytest.mark.parametrize("batch_size", [3, 12, 24])
def test_a_decay_after_a_warmup_does_not_jump_at_another_batch_size_and_ends_with_the_epochs(cut, batch_size):
    """10 steps in each of 4 epochs, of which the warm-up takes 8; then another number of steps."""

    def plan(size, resumed):
        settings = DistributedTrainingConfig(epochs=4, batch_size=size, warmup_steps=8)
        return resolve(settings, 1, 60, schedule=ScheduleConfig(name="linear"), resumed=resumed).step.rate

    before, (step, epochs, samples) = plan(6, None), cut
    after = plan(batch_size, Resumed(*cut, before.warmup_epochs))
    old, new, num_steps = (
        build_schedule(before),
        build_schedule(after),
        60 // batch_size + bool(60 % batch_size),
    )
    end = step + (3 - epochs) * num_steps + -(-(60 - samples) // batch_size)
    assert float(new(step)) == pytest.approx(float(old(step)), abs=1 / num_steps)
    assert float(new(end)) == 0 < float(new(end - 1)) == pytest.approx(1 / after.decay_steps, rel=1e-4)
    again = Resumed(end - num_steps, 3, 0, after.warmup_epochs)
    assert plan(batch_size, again) == after  # or a second stop would change bits


def test_a_resumed_run_counts_the_steps_that_its_epochs_would_have_had():
    epoch = BatchPlan(60, 6, 1, 1)  # 10 steps
    assert [Resumed(15, 1, 30).moved(epoch), Resumed(40, 4, 0).moved(epoch)] == [0, 0]
    assert [Resumed(5, 1, 0).moved(epoch), Resumed(40, 1, 30).moved(epoch)] == [5, -25]


def test_a_decay_over_a_loader_needs_a_number_of_steps():
    """A loader has no known number of steps: the rate used to be at its end after one step."""
    one = DistributedTrainingConfig()
    with pytest.raises(ConfigError, match=r"schedule\.name=cosine: .*loader.*decay_steps .*max_steps"):
        resolve(one, 2, schedule=COSINE)
    assert resolve(one, 2, schedule=COSINE.model_copy(update={"decay_steps": 9})).step.rate.decay_steps == 9
    one.steps_per_epoch, one.epochs = 7, 3
    assert resolve(one, 2, schedule=COSINE).step.rate.decay_steps == 21
    one.max_steps = 12
    assert resolve(one, 2, schedule=COSINE).step.rate.decay_steps == 12


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


def test_what_leaves_no_step_is_refused():
    with pytest.raises(DataError, match="drop_last=True .*15 .*16"):
        resolve(DistributedTrainingConfig(batch_size=8, drop_last=True), 2, 15)
