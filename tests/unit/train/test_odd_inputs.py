"""Samples, weights and outputs that no training can be right with: one line, and the trainer is as it was."""

import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import CheckpointError, DataError
from tests.support.trainers import CLASSES, X, Y, config, trainer
from tests.support.trainers import own_group as own_group

IGNORED = np.full(len(Y), -100, np.int32)


class Places(linen.Module):
    """Takes rows of any length."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(x[:, :, None]).mean(1)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(x)


def test_another_length_is_fine_where_the_model_takes_it():
    train = trainer(Places())
    train.fit(X, Y, config(epochs=1))
    assert train.predict(X[:, :4]).shape == (len(X), CLASSES)


def test_a_mean_of_nothing_is_refused():
    ignoring = cx.CrossEntropyLoss(ignore_index=-100)
    with pytest.raises(DataError, match="training .*ignore_index"):
        trainer(Net(), ignoring).fit(X, IGNORED, config(epochs=1))
    train = trainer(Net(), ignoring)
    with pytest.raises(DataError, match="evaluated .*ignore_index"):
        train.fit(X, Y, X, IGNORED, config(epochs=1))
    half = np.where(np.arange(len(Y)) < 40, IGNORED, Y)  # steps in which nothing counts are no harm
    history = train.fit(X, half, config(epochs=1, shuffle=False))
    assert np.isfinite(history.train_losses[0])


@pytest.mark.parametrize("loss", [lambda output, target, mask: 0.0, lambda output: 0.0])
def test_a_loss_of_other_arguments_is_named_with_what_it_is_given(loss):
    for given in (loss, cx.Task({"a": loss, "b": cx.CrossEntropyLoss()})):
        with pytest.raises(DataError, match=r"float32\[4, 3\].*int32\[4\]"):
            trainer(Net(), given).fit(X, Y, config(epochs=1))


def test_a_run_that_must_go_on_makes_no_folder(tmp_path):
    saving = {"checkpoint_dir": str(tmp_path / "runs" / "checkpoints"), "checkpoint_every_n_epochs": 1}
    with pytest.raises(CheckpointError, match="resume='must'.*checkpoints"):
        trainer(Net()).fit(X, Y, config(resume="must", **saving))
    assert list(tmp_path.iterdir()) == []
