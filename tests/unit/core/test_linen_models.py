"""flax.linen modules as functions."""

import jax
import jax.numpy as jnp
import optax
from flax import linen

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.linen_models import from_linen
from cyxjax.core.losses import MSELoss
from cyxjax.train.trainer import DistributedTrainer


def test_shapes_are_asked_without_drawing_values():
    fns, key, inputs = from_linen(linen.Dense(3)), jax.random.key(0), jnp.ones((2, 5))
    shapes = jax.eval_shape(fns.init, key, inputs)
    drawn = fns.init(key, inputs)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype), drawn
    )


def test_zero1_trains_a_linen_module(group, tmp_path):
    # its optimizer is looked at beforehand, with the shapes of the parameters
    config = DistributedTrainingConfig(
        epochs=1, comm="zero1", checkpoint_dir=str(tmp_path), checkpoint_every_n_epochs=0, verbose=False
    )
    trainer = DistributedTrainer(linen.Dense(1), MSELoss(), optax.sgd(0.1))
    x = jnp.arange(16.0).reshape(8, 2) / 16
    history = trainer.fit(x, x.sum(1, keepdims=True), config)
    assert history.train_losses[0] > 0
