"""Augmentation on the device: the draws of a sample do not depend on its replica or the start of a run."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import linen

from cyxjax.core.draws import micro_batch_key, sample_key, sample_words, step_key
from cyxjax.core.model.augment import as_augment, check_augment, keyed, with_augment
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.data.batches import BatchPlan
from cyxjax.data.sources import ArrayDataset
from cyxjax.data.streams import RowBatches, Rows
from cyxjax.train.feeding.feed import dataset_feed
from cyxjax.train.feeding.loader_reader import one_pass
from cyxjax.train.feeding.loader_steps import steps
from cyxjax.train.feeding.placing import keying_for
from cyxjax.train.hooks.hook import Position
from tests.support.refusals import refused
from tests.support.resuming import check_goes_on
from tests.support.trainers import X, Y, config, shake, trainer

IMAGE = np.zeros((1, 8, 8, 3), np.float32)


def alone(inputs):
    """The outputs of a model that returns its inputs, which are augmented only in training."""
    fns = ModelFns(lambda key, x: ({}, {}), lambda params, state, x, key, train: (x, state))
    return np.asarray(with_augment(fns, shake).apply({}, {}, inputs, None, True)[0])


def test_a_samples_draws_are_named_by_seed_epoch_and_place_and_by_nothing_else():
    words = sample_words(7, 2, np.array([5, 0, 11]))
    assert words.tolist() == [[7, 2, 5], [7, 2, 0], [7, 2, 11]]
    among, by_itself = alone(keyed(X[:3], 7, 2, np.array([5, 0, 11]))), alone(keyed(X[2:3], 7, 2, [11]))
    assert among[2].tobytes() == by_itself[0].tobytes()
    assert (among != X[:3]).all()
    for seed, epoch, place in [(8, 2, 11), (7, 3, 11), (7, 2, 10)]:
        assert (alone(keyed(X[2:3], seed, epoch, [place])) != by_itself).any()
    assert (alone(X[:3]) == X[:3]).all()  # evaluation and prediction


def test_a_samples_key_is_no_steps():
    # Seed 7, epoch 2, place 5, and step 2's micro-batch that begins at sample 5.
    of_step = micro_batch_key(
        step_key(jax.random.key_data(jax.random.key(7)), 2), 0, 5, rows=1, num_replicas=8
    )
    of_sample = sample_key(np.uint32([7, 2, 5]))
    assert (jax.random.key_data(of_step) != jax.random.key_data(of_sample)).any()


def seen(num_replicas, batch_size, accumulation, first=0):
    """sample -> the words that seed its draws, in epoch 1, from position `first` on."""
    data = ArrayDataset(np.arange(60), np.zeros(60))
    plan = BatchPlan(60, batch_size, num_replicas, accumulation)
    on_host = SimpleNamespace(shares=range(num_replicas), num_shares=num_replicas, put=lambda host, _: host)
    order = {"seed": 3, "shuffle": True, "depth": 0}
    feed = dataset_feed(on_host, data, plan, None, **order, keying=keying_for(shake, 9))
    found = {}
    for fed in feed.train(Position(0, 1, first, 0), lambda: (0.0, False), 1):
        for sample, words, weight in zip(*fed.batch.inputs, fed.batch.weight, strict=True):
            if weight:
                found[int(sample)] = words.tolist()
    return found


def test_a_sample_of_a_data_set_has_its_own_words_at_any_batch_and_after_a_resume():
    whole = seen(1, 60, 1)
    assert sorted(words[2] for words in whole.values()) == list(range(60))
    assert all(words[:2] == [9, 1] for words in whole.values())
    for replicas, batch_size, accumulation in [(4, 3, 1), (2, 3, 4), (3, 7, 1)]:
        assert seen(replicas, batch_size, accumulation) == whole
    rest = seen(2, 4, 1, first=25)
    assert rest.items() <= whole.items()
    assert len(rest) == 35


@pytest.mark.parametrize(("ranks", "local", "accumulation"), [(1, 1, 1), (1, 4, 1), (2, 2, 2), (3, 1, 2)])
def test_a_sample_of_a_stream_that_ranks_share_has_its_number_in_it(ranks, local, accumulation):
    found, each = {}, 12 // (ranks * accumulation)
    for rank in range(ranks):
        loader = RowBatches(Rows(range(40)), each, rank, ranks)
        for step, host in enumerate(
            steps(one_pass(loader), local, accumulation)
        ):  # steps of 12 samples over all ranks
            places = 12 * step + host.places
            found |= {int(x): int(p) for x, p, w in zip(host.inputs, places, host.weight, strict=True) if w}
    assert found == {number: number for number in range(40)}


def test_several_are_done_in_turn_each_with_its_own_key():
    assert as_augment(None) is None
    assert as_augment([]) is None
    assert as_augment([shake]) is shake
    twice = as_augment([shake, shake])
    key, x = jax.random.key(0), X[0]
    first = shake(jax.random.fold_in(key, 0), x)
    assert (twice(key, x) == shake(jax.random.fold_in(key, 1), first)).all()


def test_numpy_s_random_numbers_are_refused_and_other_functions_are_not():
    table = np.arange(8 * 8 * 3, dtype=np.float32).reshape(8, 8, 3)
    for augment in (
        lambda key, x: x + np.random.rand(),
        lambda key, x: x + np.float32(np.random.rand(8, 8, 3)),
    ):
        with refused("data.augment", match=r"jax\.random\.uniform"):
            check_augment(augment, IMAGE)
    check_augment(lambda key, x: x * table, IMAGE)
    check_augment(lambda key, x: x, np.zeros((1, 4)))  # float64, which jax keeps as float32
    check_augment(
        lambda key, x: {"a": x["a"], "b": x["b"][::-1]}, {"a": np.zeros((1, 2), np.int32), "b": IMAGE}
    )


def test_what_tells_one_from_another_is_its_program():
    def by(factor):
        return lambda key, x: x * factor

    table = np.arange(8 * 8 * 3, dtype=np.float32).reshape(8, 8, 3)
    assert check_augment(by(2.0), IMAGE) == check_augment(lambda key, x: x * 2.0, IMAGE)
    different = [shake, by(2.0), by(3.0), by(table), by(table + 1), as_augment([shake, shake])]
    assert len({check_augment(one, IMAGE) for one in different}) == len(different)
    relu = lambda: lambda key, x: jax.nn.relu(x)  # noqa: E731  a function with rules of its own is written so
    assert check_augment(relu(), IMAGE) == check_augment(relu(), IMAGE)


def test_a_run_that_was_cut_in_an_epoch_goes_on_with_the_same_draws(tmp_path, own_group, one_device):
    whole, _ = check_goes_on(tmp_path, lambda: (X, Y), 7, lambda: trainer(linen.Dense(3), augment=shake))
    assert whole.history.train_losses != trainer(linen.Dense(3)).fit(X, Y, config()).train_losses
    assert (whole.predict(X[:5]) == whole.predict(X[:5])).all()
