"""What would be counted without a word, or would never come to an end, is refused in one line."""

import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import ConfigError, DataError
from tests.support.trainers import X, Y, config, mlp
from tests.support.trainers import own_group as own_group


class Loader:
    """Batches of 8; starts anew each time."""

    def __init__(self, y):
        self.y = y

    def __iter__(self):
        return iter([(X[i : i + 8], self.y[i : i + 8]) for i in range(0, 24, 8)])


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
        train.evaluate(Loader(odd))
    assert train.evaluate(Loader(Y)) == pytest.approx(train.evaluate(X[:24], Y[:24]), rel=1e-5)


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
