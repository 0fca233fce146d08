"""Norms that cannot tell samples from padding: refused before training, where there is padding."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import MSELoss
from cyxjax.core.model.adapter import adapt
from cyxjax.data.batches import BatchPlan
from cyxjax.errors import ConfigError
from cyxjax.train.checks.batch_checks import check_norms
from cyxjax.train.settings import BatchShape
from cyxjax.train.trainer import DistributedTrainer


class InGroups(linen.Module):
    """Takes two samples at a time, as ghost batch norm does."""

    @linen.compact
    def __call__(self, x, train=False):
        pairs = x.reshape(-1, 2, *x.shape[1:]) if len(x) > 1 else x[None]
        return linen.BatchNorm(use_running_average=not train, axis=-1)(pairs).reshape(x.shape)


class Plain(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        return linen.BatchNorm(use_running_average=not train)(x)


def told(model, num_samples, **plan):
    epoch = BatchPlan(num_samples, 4, **plan) if num_samples else None
    settings = SimpleNamespace(
        reading=SimpleNamespace(epoch=epoch), step=SimpleNamespace(batch=BatchShape(4, 1, 1))
    )
    fns, inputs = adapt(model), np.ones((1, 3), np.float32)
    jax.eval_shape(fns.init, jax.random.key(0), inputs)
    return check_norms(fns, settings, inputs)


def test_a_norm_that_cannot_tell_padding_takes_full_batches():
    model = InGroups()
    assert told(model, 8) == []
    assert told(model, 9, drop_last=True) == []
    assert told(model, 0)
    with pytest.raises(ConfigError, match="drop_last"):
        told(model, 9)


def test_a_norm_that_can_takes_any():
    assert told(Plain(), 9) == []
    assert told(Plain(), 0) == []


def test_nothing_is_written_where_a_fit_is_refused(group, tmp_path):
    x = np.ones((9, 2), np.float32)
    config = DistributedTrainingConfig(
        epochs=1, batch_size=4, checkpoint_dir=str(tmp_path / "kept"), verbose=False
    )
    with pytest.raises(ConfigError, match="drop_last"):
        DistributedTrainer(InGroups(), MSELoss(), optax.sgd(0.1)).fit(x, x, config)
    assert not (tmp_path / "kept").exists()
