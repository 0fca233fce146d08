"""A loss that the model computes itself: a value per sample, or one number of a whole batch."""

import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train.trainer import DistributedTrainer

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


def fit(loss, folder):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype(np.float32), np.zeros(24, np.int32)
    config = DistributedTrainingConfig(epochs=1, global_batch_size=8, checkpoint_dir=str(folder))
    return DistributedTrainer(Model(loss), None, optax.sgd(0.1)).fit(x, y, config)


@pytest.mark.parametrize("name", RIGHT)
def test_one_value_a_sample_trains(name, tmp_path):
    assert np.isfinite(fit(RIGHT[name], tmp_path / "run").train_losses).all()
