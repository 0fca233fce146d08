"""Steps as well as epochs: evaluations within an epoch, and epochs of so many steps of a stream."""

import itertools

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.config.experiment import ScheduleConfig
from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.settings import resolve
from tests.support.trainers import VAL, X, Y, batches, config, trainer, use_devices

ALL = (X, Y, *VAL)  # 60 samples to train on: 15 steps of 4 an epoch


@pytest.fixture(autouse=True)
def one_device(own_group):
    use_devices(1)


def bits(one):
    return [leaf.tobytes() for _, leaf in named_leaves(one.params)]


def by_steps(every, **more):
    return config(evaluate_every_n_steps=every, evaluate_every_n_epochs=0, **more)


def loader(start=0):
    """60 samples in 5 batches."""
    return batches(X[start:], Y[start:], 12)


def test_evaluations_stand_at_their_steps_and_change_nothing():
    plain, looked = trainer(), trainer()
    plain.fit(*ALL, config())
    history = looked.fit(*ALL, config(evaluate_every_n_steps=4))
    assert history.val_steps == [4, 8, 12, 15, 16, 20, 24, 28, 30]
    assert history.val_epochs == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert (history.steps, history.epochs) == ([15, 30], [0, 1])
    assert len(history.val_losses) == 9
    assert history.rows()[1]["val_loss"] == history.val_losses[-1] == looked.evaluate(*VAL)[0]
    assert bits(plain) == bits(looked)


@pytest.mark.parametrize("data", [ALL, (loader(), VAL)], ids=["arrays", "loader"])
def test_an_evaluation_at_an_epochs_last_step_is_made_once(data):
    every = 15 if data is ALL else 5
    assert trainer().fit(*data, config(evaluate_every_n_steps=every)).val_steps == [every, 2 * every]
    assert trainer().fit(*data, by_steps(every)).val_steps == [every, 2 * every]


def test_no_validation_data_no_evaluation():
    assert trainer().fit(X, Y, config(evaluate_every_n_steps=2)).val_steps == []


def test_early_stopping_waits_for_evaluations_within_an_epoch():
    # So small a rate improves nothing: the first evaluation is the best, the next two are not better.
    history = trainer(lr=1e-30).fit(*ALL, by_steps(4, early_stopping_patience=2))
    assert (history.num_steps, history.stopped_by, history.val_steps) == (12, "early_stopping", [4, 8, 12])


def test_a_run_that_ends_after_max_steps_says_so_unless_it_had_come_to_its_end():
    one = trainer()
    history = one.fit(*ALL, config(epochs=2, max_steps=3))
    assert (history.num_steps, history.stopped_by) == (3, "max_steps")
    whole = trainer().fit(*ALL, config(epochs=1))
    exactly = trainer().fit(*ALL, config(epochs=1, max_steps=whole.num_steps))
    assert (exactly.num_steps, exactly.stopped_by) == (whole.num_steps, "")


def test_a_run_that_ended_by_max_steps_trains_no_further_when_it_is_started_again(tmp_path):
    folder = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto", "epochs": 2}
    assert trainer().fit(*ALL, config(max_steps=3, **folder)).num_steps == 3
    for steps in (3, 2):
        again = trainer().fit(*ALL, config(max_steps=steps, **folder))
        assert (again.num_steps, again.stopped_by) == (3, "max_steps")
    assert trainer().fit(*ALL, config(max_steps=4, **folder)).num_steps == 4


def test_the_learning_rate_falls_within_an_epoch():
    slower = cx.ReduceLROnPlateau(factor=0.5, patience=2)
    one = trainer(lr=1e-30, callbacks=[slower])
    one.fit(*ALL, by_steps(3, epochs=1))  # looks at 3 (best), 6 and 9: halved, 12 and 15: halved again
    assert slower.learning_rate_factor() == 0.25


def test_the_best_checkpoint_is_of_the_best_evaluation(tmp_path):
    one = trainer(callbacks=[cx.BestCheckpoint(str(tmp_path / "best"), mode="max")])  # the highest loss
    history = one.fit(*ALL, by_steps(2, epochs=1))
    best = int(np.argmax(history.val_losses))
    again = trainer()
    again.load_checkpoint(str(tmp_path / "best"))
    assert again.run_state.position.step == history.val_steps[best] != history.num_steps
    assert again.evaluate(*VAL)[0] == history.val_losses[best]


def test_a_run_that_was_cut_has_the_evaluations_of_one_that_was_not(tmp_path):
    kept = {"checkpoint_every_n_steps": 4, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    whole, first, second = trainer(), trainer(), trainer()
    expected = whole.fit(*ALL, by_steps(4))
    first.fit(*ALL, by_steps(4, max_steps=17, **kept))
    history = second.fit(*ALL, by_steps(4, **kept))
    assert history.val_steps == expected.val_steps == [4, 8, 12, 16, 20, 24, 28]
    assert history.val_losses == expected.val_losses
    assert bits(whole) == bits(second)


# ---- epochs of so many steps ------------------------------------------------------------------------


def test_a_stream_goes_on_from_epoch_to_epoch():
    passes, steps = trainer(), trainer()
    passes.fit(loader(), VAL, config(epochs=2))  # 10 steps
    history = steps.fit(loader(), VAL, config(epochs=5, steps_per_epoch=2))
    assert (history.steps, history.val_steps) == ([2, 4, 6, 8, 10], [2, 4, 6, 8, 10])
    assert bits(passes) == bits(steps)


def test_a_loader_of_ours_is_shuffled_anew_at_each_pass():
    passes, steps = trainer(), trainer()
    loader = cx.DataLoader((X, Y), batch_size=12, shuffle=True, seed=3)
    steps.fit(loader, config(epochs=5, steps_per_epoch=2))
    passes.fit(cx.DataLoader((X, Y), batch_size=12, shuffle=True, seed=3), config(epochs=2))
    assert bits(passes) == bits(steps)


def endless():
    for i in itertools.count():
        yield X[12 * (i % 5) : 12 * (i % 5) + 12], Y[12 * (i % 5) : 12 * (i % 5) + 12]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_generator_without_end_is_trained_on_as_a_loader(accumulation):
    one, other = trainer(), trainer()
    more = {"steps_per_epoch": 2, "epochs": 2, "gradient_accumulation_steps": accumulation}
    history = one.fit(endless(), VAL, config(**more))
    other.fit(loader(), config(**more))
    assert len(history.train_losses) == len(history.val_losses) == 2
    assert bits(one) == bits(other)  # what was looked at before training is not lost


def test_a_generator_that_ends_too_soon_is_an_error_that_says_so():
    with pytest.raises(DataError, match="5 batches .*max_steps"):
        trainer().fit(iter(loader()), config(steps_per_epoch=4))
    with pytest.raises(DataError, match="iterator .*steps_per_epoch"):
        trainer().fit(iter(loader()), config())


@pytest.mark.parametrize(("make", "cut"), [(loader, 4), (endless, 3)])
def test_a_stream_goes_on_where_it_was_cut(tmp_path, make, cut):
    more = {"steps_per_epoch": 2, "epochs": 4, "evaluate_every_n_steps": 1}
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    whole, first, second = trainer(), trainer(), trainer()
    expected = whole.fit(make(), VAL, config(**more))
    first.fit(make(), VAL, config(max_steps=cut, **more, **kept))
    history = second.fit(make(), VAL, config(**more, **kept))
    assert bits(whole) == bits(second)
    assert (history.train_losses, history.val_losses) == (expected.train_losses, expected.val_losses)


def test_a_stream_of_other_batches_than_before_is_told(tmp_path, capfd):
    more = {"steps_per_epoch": 4, "checkpoint_every_n_steps": 1, "resume": "auto"}
    trainer().fit(loader(), config(checkpoint_dir=str(tmp_path), max_steps=2, **more))
    trainer().fit(loader(start=50), config(checkpoint_dir=str(tmp_path), **more))  # batches of 10
    said = capfd.readouterr().err
    assert "24 samples of epoch 0" in said
    assert "first 20 samples: 4 of them" in said


def test_epochs_of_another_length_are_refused_at_a_resume(tmp_path):
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    trainer().fit(loader(), config(max_steps=3, steps_per_epoch=2, **kept))
    with pytest.raises(ConfigError, match="steps_per_epoch .*2 .*3"):
        trainer().fit(loader(), config(steps_per_epoch=3, **kept))


def test_samples_with_numbers_have_epochs_of_their_own():
    with pytest.raises(ConfigError, match="steps_per_epoch=2"):
        trainer().fit(*ALL, config(steps_per_epoch=2))


def test_a_schedule_of_a_stream_is_as_long_as_its_steps():
    one = config(epochs=3, steps_per_epoch=7)
    assert resolve(one, 1, schedule=ScheduleConfig(name="cosine")).step.rate.decay_steps == 21
    with pytest.raises(ConfigError, match=r"schedule\.name=cosine.*steps_per_epoch"):
        resolve(config(epochs=3), 1, schedule=ScheduleConfig(name="cosine"))
