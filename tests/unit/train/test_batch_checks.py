"""Samples, labels and outputs that no training can be right with: an error, and the trainer is as it was."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.data.sources import as_batches
from cyxjax.errors import CheckpointError, ConfigError, DataError
from tests.support.trainers import CLASSES, VAL, X, Y, batches, config, mlp, trainer, use_devices

BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]


@pytest.fixture(autouse=True)
def one_device(own_group):
    use_devices(1)


@pytest.mark.parametrize("val", [(VAL[0][:, :3], VAL[1]), batches(X[:8, :3], Y[:8], 8)])
def test_validation_data_of_another_width_is_refused_before_a_step(val):
    with pytest.raises(TypeError, match="3"):
        trainer().prepare((X, Y) if isinstance(val, tuple) else batches(X, Y, 8), val, config=config())


@pytest.mark.parametrize(("odd", "said"), [(None, "None"), ((X[:0], Y[:0]), "has 0")])
def test_a_batch_of_nothing_is_named(odd, said):
    with pytest.raises(DataError, match=f"batch 2 .*{said}"):
        list(as_batches([*BATCHES[:2], odd]))


@pytest.mark.parametrize(
    ("loss", "y", "said"),
    [
        (cx.NLLLoss(), Y.astype(np.float32), r"NLLLoss: .*float32\[4, 3\] .*float32\[4\]"),  # cut to int
        (cx.CrossEntropyLoss(), Y[:, None], r"CrossEntropyLoss: .*int32\[4, 1\].* y\[:, 0\]"),
    ],
)
def test_targets_that_a_loss_of_ours_does_not_take(loss, y, said):
    with pytest.raises(DataError, match=said):
        trainer(loss=loss).prepare(X, y, config=config())


@pytest.mark.parametrize("loss", [cx.MSELoss(), cx.L1Loss(), cx.HuberLoss(), cx.BCEWithLogitsLoss()])
def test_no_loss_of_ours_spreads(loss):
    for output, target in (((8, 1), (8,)), ((8,), (8, 1)), ((8, 3), (8, 1))):
        with pytest.raises(DataError, match=f"{type(loss).__name__}: .*float32"):
            loss(jnp.zeros(output), jnp.zeros(target))


class Places(linen.Module):
    """Takes rows of any length."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(x[:, :, None]).mean(1)


def test_another_length_is_fine_where_the_model_takes_it():
    train = trainer(Places())
    train.fit(X, Y, config(epochs=1))
    assert train.predict(X[:, :4]).shape == (len(X), CLASSES)


def test_a_mean_of_nothing_is_refused():
    ignored = np.full(len(Y), -100, np.int32)
    ignoring = cx.CrossEntropyLoss(ignore_index=-100)
    with pytest.raises(DataError, match="training .*ignore_index"):
        trainer(loss=ignoring).fit(X, ignored, config(epochs=1))
    train = trainer(loss=ignoring)
    with pytest.raises(DataError, match="evaluated .*ignore_index"):
        train.fit(X, Y, X, ignored, config(epochs=1))
    half = np.where(np.arange(len(Y)) < 40, ignored, Y)  # steps in which nothing counts are no harm
    history = train.fit(X, half, config(epochs=1, shuffle=False))
    assert np.isfinite(history.train_losses[0])


def test_a_run_that_must_go_on_makes_no_folder(tmp_path):
    saving = {"checkpoint_dir": str(tmp_path / "runs" / "checkpoints"), "checkpoint_every_n_epochs": 1}
    with pytest.raises(CheckpointError, match="resume='must'.*checkpoints"):
        trainer().fit(X, Y, config(resume="must", **saving))
    assert list(tmp_path.iterdir()) == []


def test_fit_refuses_a_run_folder_that_is_a_file_or_holds_other_things(tmp_path):
    (tmp_path / "thesis.tex").touch()
    train = cx.DistributedTrainer(mlp(), "cross_entropy", "sgd")
    for folder in (tmp_path / "thesis.tex", tmp_path):
        with pytest.raises(ConfigError, match=r"thesis\.tex") as refused:
            train.fit(X, Y, epochs=1, run_dir=str(folder))
        assert refused.value.key == "run_dir"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("label", [-1, 3])
def test_evaluation_refuses_a_label_that_names_no_class(label):
    train = cx.distributed.DistributedTrainer(mlp(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    train.fit(X, Y, config(epochs=1))
    odd = Y[:24].copy()
    odd[17] = label
    with pytest.raises(DataError, match=f"data: sample 17 .*label {label}"):
        train.evaluate(X[:24], odd)
    with pytest.raises(DataError, match=f"data: batch 2: sample 1 .*label {label}"):
        train.evaluate(batches(X[:24], odd, 8))
    assert train.evaluate(batches(X[:24], Y, 8)) == pytest.approx(train.evaluate(X[:24], Y[:24]), rel=1e-5)


def test_a_label_that_is_ignored_is_evaluated():
    train = cx.distributed.DistributedTrainer(
        mlp(), cx.CrossEntropyLoss(ignore_index=-100), cx.SGDOptimizer(0.1)
    )
    some = np.where(np.arange(24) < 12, Y[:24], -100)
    train.fit(X, Y, config(epochs=1))
    assert train.evaluate(X[:24], some) == pytest.approx(train.evaluate(X[:12], Y[:12]), rel=1e-5)


class TimeFirst(linen.Module):
    """A recurrent model that returns (time, samples, classes)."""

    @linen.compact
    def __call__(self, x):
        return linen.RNN(linen.SimpleCell(3))(x[:, :, None]).swapaxes(0, 1)


class Ensemble(linen.Module):
    """Three members, stacked in dimension 0."""

    @linen.compact
    def __call__(self, x):
        members = linen.vmap(
            linen.Dense,
            in_axes=None,
            out_axes=0,
            axis_size=3,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return members(3)(x)


@pytest.mark.parametrize("model", [TimeFirst(), Ensemble()], ids=["time_first", "ensemble"])
def test_an_output_whose_samples_are_not_in_dimension_0_is_refused(model):
    trainer = cx.DistributedTrainer(model, cx.MSELoss(), cx.SGDOptimizer(0.1))
    with pytest.raises(DataError, match="dimension 0 "):
        trainer.fit(X, X, config(epochs=1))
    wrapped = cx.distributed.DistributedDataParallel(model)
    with pytest.raises(DataError, match="dimension 0 "):
        cx.MSELoss()(wrapped(X), X)
