"""Data as people hold them, lists, frames, paths, words: read as meant, or refused with the way."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyxjax as cx
from cyxjax.config.load import load_config
from cyxjax.errors import DataError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train import experiment
from cyxjax.train.feeding import fit_data
from tests.unit.train.test_foreign_loaders import Loader, X, Y, bits, fit

ce = optax.losses.softmax_cross_entropy_with_integer_labels
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]


@pytest.mark.parametrize(
    "given",
    [
        BATCHES,  # three samples of eight labels each were trained on
        [{"x": x, "label": y} for x, y in BATCHES],
        [(x, np.eye(3)[y]) for x, y in BATCHES],
        [(x, x, y) for x, y in BATCHES],
    ],
)
def test_a_list_of_batches_is_not_taken_for_samples(given):
    with pytest.raises(DataError, match=r"3 .*\(8, 4\) .*cx.data.Batches\(data\)"):
        fit_data.parse((given,), None)


@pytest.mark.parametrize(
    "sample",
    [(X[0], 1), (X[:2], 1), (X[0], Y[:4]), (X[:4], X[:4]), (np.ones((4, 4, 3)), Y[:16].reshape(4, 4)), X[:4]],
    ids=["class", "rows", "tokens", "again", "mask", "alone"],
)
def test_lists_of_samples_are_samples(sample):
    found, _ = fit_data.parse(([sample] * 3,), None)
    assert len(found.train) == 3


def test_only_a_run_that_keeps_a_ledger_is_to_be_audited(tmp_path):
    config = load_config(["--run-dir", str(tmp_path)])
    history = DistributedTrainingHistory()
    assert "audit" not in experiment._next_commands(config, history)
    config.run_folder.ledger.touch()
    assert f"cyxjax audit {tmp_path};" in experiment._next_commands(config, history)


@pytest.mark.parametrize("devices", [1, 2])
def test_batches_may_be_of_any_size_in_any_order(devices):
    cuts = [0, 3, 16, 17, 24]
    batches = [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(cuts)]
    with cx.testing.devices(devices):
        apply = lambda params, x: x @ params["w"]  # noqa: E731
        trainer = cx.DistributedTrainer(
            ({"w": jnp.zeros((4, 3))}, apply), cx.CrossEntropyLoss(), optax.sgd(0.5)
        )
        trainer.fit(cx.data.Batches(batches), epochs=2, verbose=False, checkpoint_every_n_epochs=0)
        loss, _ = trainer.evaluate(cx.data.Batches(batches))
        assert loss == pytest.approx(trainer.evaluate(X[:24], Y[:24])[0], rel=1e-6)
        w = jnp.zeros((4, 3))
        for x, y in batches * 2:
            w -= 0.5 * jax.grad(lambda w, x=x, y=y: ce(x @ w, y).mean())(w)
        np.testing.assert_allclose(trainer.params["w"], w, rtol=1e-5, atol=1e-6)


def test_batches_are_a_loader():
    assert bits(fit(cx.data.Batches(BATCHES), epochs=2)) == bits(fit(Loader(), epochs=2))


class Table:
    """What of a frame is looked at."""

    def __init__(self, **columns):
        self.found, self.columns = {name: np.asarray(one) for name, one in columns.items()}, list(columns)

    def __len__(self):
        return len(self.found[self.columns[0]])

    def __getitem__(self, name):
        return self.found[name]

    def to_numpy(self):
        raise AssertionError("columns are read one by one: one array would lose their dtypes")


FRAME = Table(**{f"c{i}": X[:, i] for i in range(4)})


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.tolist(), Y.tolist()),
        (list(X), Y.tolist()),
        (FRAME, Y),
        (FRAME, Y.tolist()),
        (FRAME, Table(price=Y)),
        (X, Y.tolist()),
    ],
)
def test_lists_and_frames_of_inputs_and_targets_are_a_pair(x, y):
    found, _ = fit_data.parse((x, y), None)  # the targets were taken for validation data
    inputs, targets = found.train.take(np.arange(24))
    assert found.val is None
    assert (inputs.tolist(), targets.tolist()) == (X.tolist(), Y.tolist())
    both, _ = fit_data.parse((x, y, x, y), None)
    assert both.val.take(np.arange(24))[1].tolist() == Y.tolist()


@pytest.mark.parametrize("first", [[(X[0], 0), (X[1], 1)], [X[0], X[1]]])
def test_two_lists_of_samples_are_training_and_validation_data(first):
    found, _ = fit_data.parse((first, first[:1]), None)
    assert (len(found.train), len(found.val)) == (2, 1)


def test_a_frame_alone_gives_its_numbers_as_one_array():
    found = fit_data.parse((Table(a=X[:, 0], b=np.arange(24), label=Y),), None)[0].train
    inputs, targets = found.take(np.arange(24))  # one array a column: the model's IndexError
    assert inputs.tolist() == np.stack([X[:, 0], np.arange(24)], 1).tolist()
    assert targets.tolist() == Y.tolist()
    by_name = cx.data.as_dataset(Table(a=X[:, 0], b=Y, y=Y), inputs=["a", "b"]).take(np.arange(2))[0]
    assert set(by_name) == {"a", "b"}


@pytest.mark.parametrize(
    "column",
    [np.array(["red"] * 24, object), np.array([1.0, None] * 12, object), np.full(24, "2020-01-01", "M8[D]")],
)
def test_a_column_that_holds_no_numbers_is_named(column):
    for given in ((Table(a=column, b=X[:, 0]), Y), (Table(a=column, b=X[:, 0], label=Y),)):
        with pytest.raises(DataError, match="'a'"):
            fit_data.parse(given, None)
