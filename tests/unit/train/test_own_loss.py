"""A loss that the model computes itself is one of each sample, or refused before training."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import CrossEntropyLoss, MSELoss
from cyxjax.core.objective.task import Task
from cyxjax.errors import ConfigError
from cyxjax.train.trainer import DistributedTrainer

pytestmark = pytest.mark.usefixtures("two_devices")


def each(z, x):
    return ((z - x) ** 2).mean(-1)


def contrastive(z, x):
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(x)))


RIGHT = {
    "each": each,
    "token by token": lambda z, x: (z - x) ** 2,
}
WRONG = {
    "scalar": (lambda z, x: each(z, x).mean(), r"has shape \(\)"),
    "normed over the batch": (lambda z, x: each(z, x) / each(z, x).sum(), "depends on the other samples"),
    "contrastive": (contrastive, "depends on the other samples"),
    "the batch's mean for each": (lambda z, x: jnp.full(len(x), each(z, x).mean()), "depends on the other"),
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
    with pytest.raises(ConfigError, match=r"returns a dict, and CrossEntropyLoss takes one array.*loss=None"):
        fit(each, tmp_path / "run", CrossEntropyLoss())
    with pytest.raises(ConfigError, match=r"returns a dict, and MSELoss takes one array.*loss=None"):
        fit(each, tmp_path / "run", Task({"near": MSELoss(), "far": (MSELoss(), 0.1)}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", WRONG)
def test_what_compares_samples_is_refused_before_anything_is_written(name, tmp_path):
    loss, told = WRONG[name]
    with pytest.raises(ConfigError, match=f"{told}.*HINT: return .*one value a sample"):
        fit(loss, tmp_path / "run")
    assert not (tmp_path / "run").exists()
