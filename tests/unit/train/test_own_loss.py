"""A loss that the model computes itself: a value per sample, or one number of a whole batch."""

import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import CrossEntropyLoss, MSELoss
from cyxjax.core.objective.task import Task
from cyxjax.errors import DataError
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import use_devices

pytestmark = pytest.mark.usefixtures("two_devices")


def each(z, x):
    return ((z - x) ** 2).mean(-1)


RIGHT = {
    "each": each,
    "token by token": lambda z, x: (z - x) ** 2,
}


class Model(linen.Module):
    loss: callable

    @linen.compact
    def __call__(self, x, train: bool = False):
        z = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))  # couples samples, as it may
        return {"loss": self.loss(linen.Dropout(0.3, deterministic=not train)(z), x)}


def fit(loss, folder, scored_by=None):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype(np.float32), np.zeros(24, np.int32)
    config = DistributedTrainingConfig(epochs=1, global_batch_size=8, checkpoint_dir=str(folder))
    return DistributedTrainer(Model(loss), scored_by, optax.sgd(0.1)).fit(x, y, config)


@pytest.mark.parametrize("name", RIGHT)
def test_one_value_a_sample_trains(name, tmp_path):
    assert np.isfinite(fit(RIGHT[name], tmp_path / "run").train_losses).all()


def test_a_loss_for_one_array_says_how_a_dict_is_taken(tmp_path):
    with pytest.raises(DataError, match="CrossEntropyLoss"):
        fit(each, tmp_path / "run", CrossEntropyLoss())
    with pytest.raises(DataError, match="MSELoss"):
        fit(each, tmp_path / "run", Task({"near": MSELoss(), "far": (MSELoss(), 0.1)}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_number_of_the_model_needs_the_whole_batch(replicas, tmp_path):
    use_devices(replicas)
    number = lambda z, x: each(z, x).mean()  # noqa: E731
    if replicas == 1:
        assert np.isfinite(fit(number, tmp_path / "run").train_losses).all()
        return
    with pytest.raises(DataError, match=r"'loss' .*\(B,\)"):
        fit(number, tmp_path / "run")
    assert not (tmp_path / "run").exists()
