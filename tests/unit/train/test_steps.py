"""Counting in steps: evaluations within an epoch, epochs of a number of steps, several per dispatch."""

import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps
from cyxjax.core.mesh import build_mesh
from cyxjax.data.batches import BatchPlan, iterate_blocks
from cyxjax.data.order import Order
from cyxjax.data.sources import as_dataset
from cyxjax.errors import ConfigError, DataError
from cyxjax.train import fingerprints
from cyxjax.train.feeding.placing import RowPlacer
from tests.support.resuming import check_goes_on
from tests.support.trainers import (
    VAL,
    At,
    X,
    Y,
    after_fit,
    batches,
    config,
    does,
    loaded,
    same_bits,
    shake,
    trainer,
    use_devices,
)

ALL = (X, Y, *VAL)  # 60 samples to train on: 15 steps of 4 an epoch
WORSE = (X, Y, VAL[0], (VAL[1] + 1) % 3)  # wrong labels: the more the model learns, the higher the loss

pytestmark = pytest.mark.usefixtures("one_device")


def by_steps(every, **more):
    return config(evaluate_every_n_steps=every, evaluate_every_n_epochs=0, **more)


def loader():
    """60 samples in 5 batches."""
    return batches(X, Y, 12)


def test_evaluations_stand_at_their_steps_and_change_nothing():
    plain, looked = after_fit(X, Y, config(evaluate_every_n_steps=2)), trainer()
    assert plain.history.val_steps == []  # without validation data
    history = looked.fit(*ALL, config(evaluate_every_n_steps=4))
    assert history.val_steps == [4, 8, 12, 15, 16, 20, 24, 28, 30]
    assert history.val_epochs == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert (history.steps, history.epochs) == ([15, 30], [0, 1])
    assert len(history.val_losses) == 9
    assert history.rows()[1]["val_loss"] == history.val_losses[-1] == looked.evaluate(*VAL)[0]
    assert same_bits(plain.params, looked.params)


class Epochs(cx.Callback):
    """Keeps the validation loss that `on_epoch` was given."""

    def __init__(self):
        self.losses = []

    def on_epoch(self, info):
        self.losses.append(info.val["loss"])


@pytest.mark.parametrize("data", [ALL, (loader(), VAL)], ids=["arrays", "loader"])
def test_an_evaluation_at_an_epochs_last_step_is_made_once_and_on_epoch_gets_it(data):
    every = 15 if data is ALL else 5
    for settings in config(evaluate_every_n_steps=every), by_steps(every):
        one = trainer(callbacks=[Epochs()])
        assert one.fit(*data, settings).val_steps == [every, 2 * every]
        assert one.callbacks[0].losses == one.history.val_losses
    cut = trainer(callbacks=[Epochs()])  # max_steps at the end of an epoch: it ends as any other
    assert cut.fit(*data, config(max_steps=every)).val_losses == cut.callbacks[0].losses != []


def test_early_stopping_waits_for_evaluations_within_an_epoch():
    # The first evaluation is the best, the next two are not better.
    history = trainer().fit(*WORSE, by_steps(4, early_stopping_patience=2))
    assert (history.num_steps, history.stopped_by, history.val_steps) == (12, "early_stopping", [4, 8, 12])
    assert len(history.train_losses) == 1  # of the epoch that was cut short


def test_a_run_that_max_steps_ended_says_so_and_trains_no_further_when_it_is_started_again(tmp_path):
    folder = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto", "epochs": 2}
    for steps in (3, 3, 2):
        history = trainer().fit(*ALL, config(max_steps=steps, **folder))
        assert (history.num_steps, history.stopped_by) == (3, "max_steps")
        assert (history.epochs, history.steps) == ([0], [3])  # an epoch that is cut short is a row
    history = trainer().fit(*ALL, config(max_steps=19, **folder))
    assert (history.epochs, history.steps) == ([0, 1], [15, 19])
    whole = trainer().fit(*ALL, config(epochs=1, max_steps=15))
    assert (whole.num_steps, whole.stopped_by) == (15, "")  # it had come to its end


def test_the_best_checkpoint_is_of_the_best_evaluation(tmp_path):
    one = trainer(callbacks=[cx.BestCheckpoint(str(tmp_path / "best"), mode="max")])  # the highest loss
    history = one.fit(*ALL, by_steps(2, epochs=1))
    best = int(np.argmax(history.val_losses))
    again = loaded(tmp_path / "best")
    assert again.run_state.position.step == history.val_steps[best] != history.num_steps
    assert again.evaluate(*VAL)[0] == history.val_losses[best]


def test_a_run_that_was_cut_has_the_evaluations_of_one_that_was_not(tmp_path):
    whole, _ = check_goes_on(
        tmp_path, lambda: (X, Y), 17, evaluate_every_n_steps=4, evaluate_every_n_epochs=0
    )
    assert whole.history.val_steps == [4, 8, 12, 16, 20, 24, 28]


# ---- epochs of so many steps ------------------------------------------------------------------------


def test_a_stream_goes_on_from_epoch_to_epoch():
    passes = after_fit(loader(), VAL, config(epochs=2))  # 10 steps
    steps = after_fit(loader(), VAL, config(epochs=5, steps_per_epoch=2))
    assert (steps.history.steps, steps.history.val_steps) == ([2, 4, 6, 8, 10], [2, 4, 6, 8, 10])
    assert same_bits(passes.params, steps.params)


def test_a_loader_of_ours_is_shuffled_anew_at_each_pass():
    loaders = [cx.DataLoader((X, Y), batch_size=4, shuffle=True, seed=3) for _ in range(2)]
    steps = after_fit(loaders[0], config(epochs=5, steps_per_epoch=6))
    passes = after_fit(loaders[1], config(epochs=2))
    assert same_bits(passes.params, steps.params)


def endless():
    for i in itertools.count():
        yield X[12 * (i % 5) : 12 * (i % 5) + 12], Y[12 * (i % 5) : 12 * (i % 5) + 12]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_generator_without_end_is_trained_on_as_a_loader(accumulation):
    more = {"steps_per_epoch": 2 // accumulation, "epochs": 2, "gradient_accumulation_steps": accumulation}
    one, other = after_fit(endless(), VAL, config(**more)), after_fit(loader(), config(**more))
    assert len(one.history.train_losses) == len(one.history.val_losses) == 2
    assert same_bits(one.params, other.params)  # the batch read before training is not lost


def test_a_step_takes_no_samples_of_the_next_pass_at_any_accumulation():
    stream = cx.data.Rows([(x, int(y)) for x, y in zip(X, Y, strict=True)])  # steps of 24, 24 and 12
    whole, halves = (
        after_fit(stream, config(epochs=2, steps_per_epoch=4, batch_size=size, gradient_accumulation_steps=n))
        for size, n in ((24, 1), (12, 2))
    )
    np.testing.assert_allclose(whole.history.train_losses, halves.history.train_losses, rtol=1e-6)
    assert not same_bits(whole.params, after_fit(stream, config(epochs=2, batch_size=24)).params)


@pytest.mark.parametrize(
    ("make", "steps", "error", "message"),
    [
        (lambda: (iter(loader()),), 4, DataError, "5 batches .*max_steps"),
        (lambda: (iter(loader()),), None, DataError, "iterator .*steps_per_epoch"),
        (lambda: ALL, 2, ConfigError, "steps_per_epoch=2"),  # indexed samples have their own epochs
    ],
)
def test_what_has_no_such_epochs_is_refused(make, steps, error, message):
    with pytest.raises(error, match=message):
        trainer().fit(*make(), config(steps_per_epoch=steps))


@pytest.mark.parametrize(("make", "cut"), [(loader, 4), (endless, 3)])
def test_a_stream_goes_on_where_it_was_cut(tmp_path, make, cut):
    check_goes_on(tmp_path, make, cut, steps_per_epoch=2, epochs=4, evaluate_every_n_steps=1)


def test_a_loader_of_other_batches_than_before_goes_on_after_what_it_gave_and_says_so(tmp_path, capfd):
    more = {"checkpoint_every_n_steps": 1, "resume": "auto", "epochs": 1}
    kept = [more | {"checkpoint_dir": str(tmp_path / name)} for name in "ab"]
    trainer().fit(loader(), config(max_steps=3, **kept[0]))
    # 36 samples are a batch of 24 and 12 samples of the second
    assert trainer().fit(batches(X, Y, 24), config(**kept[0])).num_steps == 3 + 2
    assert "sample 36 of epoch 1" in (message := capfd.readouterr().err)
    assert "12 samples" in message
    trainer().fit(loader(), config(max_steps=5, steps_per_epoch=6, **kept[1]))
    trainer().fit(batches(X[:24], Y[:24], 24), config(steps_per_epoch=6, **kept[1]))
    assert "sample 60 of epoch 1" in (message := capfd.readouterr().err)
    assert "12 samples" in message


def test_epochs_of_another_length_are_refused_at_a_resume(tmp_path):
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    trainer().fit(loader(), config(max_steps=3, steps_per_epoch=2, **kept))
    with pytest.raises(ConfigError, match="steps_per_epoch .*2 .*3"):
        trainer().fit(loader(), config(steps_per_epoch=3, **kept))


# ---- several steps in one dispatch -------------------------------------------------------------------------


def watched(several, stop_at=0):
    """The number and the loss of each step, with a stop at one step; what stopped the run."""
    seen = []

    def on_step(self, info):
        seen.append((info.position.step, float(info.sums[0, 0])))
        return info.position.step == stop_at

    settings = config(epochs=4, steps_per_dispatch=several)
    made = after_fit(X, Y, settings, callbacks=[does(on_step=on_step)])
    return seen, made.history.stopped_by


def test_a_callback_sees_each_step_and_stops_at_the_end_of_a_dispatch(two_devices):
    one, _ = watched(1)
    assert [step for step, _ in one] == list(range(1, 4 * 8 + 1))  # 60 samples, 4 on each of 2 replicas
    assert watched(3)[0] == one
    stopped, by = watched(3, stop_at=2)
    assert (stopped, by) == (one[: len(stopped)], "callback")
    assert len(stopped) < 20


def test_a_dispatch_ends_at_evaluations_and_at_the_last_step(two_devices):
    history = trainer().fit(*ALL, by_steps(5, epochs=8, steps_per_dispatch=3, max_steps=23))
    assert (history.num_steps, history.val_steps) == (23, [5, 10, 15, 20])


def test_auto_is_several_for_short_steps_of_arrays_without_grouped_convolutions(monkeypatch):
    for name in ("lower_step", "exact_of"):  # nothing is trained
        monkeypatch.setattr(fingerprints, name, lambda *given: None)

    def chosen(model, *data, several="auto", **values):
        return (
            trainer(model).prepare(*data, config=config(steps_per_dispatch=several, **values)).steps_at_once
        )

    assert chosen(None, X, Y) > 2
    assert chosen(None, X, Y, steps_in_flight=1) == 2
    assert chosen(None, cx.data.DataLoader((X, Y), 8, sampler=list(range(60)))) == 1
    assert chosen(Autoencoder(), IMAGES, IMAGES) > 2
    assert chosen(Autoencoder(groups=2), IMAGES, IMAGES) == 1
    with jax.numpy_dtype_promotion("standard"):  # the norm adds float32 statistics
        assert chosen(Autoencoder(), IMAGES, IMAGES, precision="bf16-mixed") > 2
    exact = {"reproducibility": "exact", "batch_size": None, "global_batch_size": 8}
    assert chosen(None, X, Y, several=4, **exact) == 1


def of_the_batch(output, target):
    """One number that couples the samples: on one replica a short batch keeps its size."""
    return jnp.sqrt(jnp.mean((jax.nn.softmax(output) - jax.nn.one_hot(target, 3)) ** 2))


class Autoencoder(linen.Module):
    groups: int = 1

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Conv(2, (3, 3), feature_group_count=self.groups)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.max_pool(x, (2, 2), (2, 2)).repeat(2, axis=1).repeat(2, axis=2)


IMAGES = np.random.default_rng(3).normal(size=(60, 4, 4, 2)).astype(np.float32)

# (devices, of the trainer, of the configuration, data): of 60 samples 8 leave a short last batch, and 3 steps
# of a dispatch do not divide the steps of an epoch
KINDS = {
    "padded": (2, {}, {"batch_size": 4}, (X, Y)),
    "own size": (1, {"loss": of_the_batch}, {"batch_size": 8}, (X, Y)),
    "convolutions, inputs as targets": (
        2,
        {"model": Autoencoder(), "loss": cx.MSELoss()},
        {"batch_size": 4},
        (IMAGES, IMAGES),
    ),
    "augmented micro-batches, sharded": (
        2,
        {"augment": shake},
        {"batch_size": 2, "gradient_accumulation_steps": 2, "comm": "zero1"},
        (X, Y),
    ),
    "in order": (2, {}, {"batch_size": 4, "shuffle": False, "drop_last": True}, (X, Y)),
    "cut by saves": (2, {}, {"batch_size": 4, "checkpoint_every_n_steps": 2}, (X, Y)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_losses_are_those_of_one_step_a_dispatch(group, tmp_path, kind):
    devices, options, settings, data = KINDS[kind]
    found = []
    for several in (1, 3):
        use_devices(devices)
        one = trainer(**options)
        more = {"steps_per_dispatch": several, "checkpoint_dir": str(tmp_path / str(several))}
        history = one.fit(*data, config(**(settings | more)))
        found.append((jax.device_get(one.state.params), history.train_losses, history.num_steps))
    assert one.plan.steps_at_once > 1
    assert found[0][1:] == found[1][1:]
    assert same_bits(found[0][0], found[1][0])


def test_each_step_of_a_dispatch_has_its_own_total_where_only_other_processes_pad():
    # The last of the steps has 7 of 8 samples; this process, of two, has 4 of them and no padding.
    data, plan = as_dataset((X[:15], Y[:15])), BatchPlan(15, 4, num_replicas=2)
    (block,) = iterate_blocks(data, Order(15), plan, range(1), size=2)
    placer = RowPlacer(build_mesh(jax.devices()[:1]))
    placer.num_shares = 2
    assert block.rows.weight.all()
    assert np.asarray(placer.put_steps(block, 2).total).tolist() == [8, 7]


def test_a_save_asked_for_with_the_last_steps_of_an_epoch_is_made_at_its_end(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_steps": 1000, "steps_in_flight": 1}
    asks = At(5, lambda info: os.kill(os.getpid(), signal.SIGUSR1))
    trainer(callbacks=[asks]).fit(X, Y, config(epochs=4, steps_per_dispatch=5, **kept))  # 15 steps an epoch
    assert list_steps(tmp_path) == [15, 60]
