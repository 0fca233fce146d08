"""A step that runs out of memory ends in one line, which names the keys that reduce memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import MSELoss
from cyxjax.errors import OutOfMemoryError, known
from cyxjax.train.trainer import DistributedTrainer
from tests.support.refusals import refused_in_a_line

HUGE = 2**42


def test_a_step_too_large_for_this_machine(tmp_path):
    def apply(params, x):
        rows = jnp.broadcast_to(x[:, :1] * params["w"][0, 0], (x.shape[0], HUGE))
        return x @ params["w"] + jnp.cumsum(rows, axis=1)[:, -1:]

    model = (lambda key, x: {"w": jnp.ones((x.shape[1], 1))}, apply)
    trainer = DistributedTrainer(model, MSELoss(), optax.sgd(0.1))
    x, y = np.ones((64, 3), np.float32), np.ones((64, 1), np.float32)
    config = DistributedTrainingConfig(batch_size=4, epochs=1, checkpoint_dir=str(tmp_path), verbose=False)
    with refused_in_a_line(OutOfMemoryError, match="gradient_accumulation_steps.*remat.*precision"):
        trainer.fit(x, y, config)


def test_other_errors_of_the_device_pass_unchanged():
    assert known(jax.errors.JaxRuntimeError("INTERNAL: something else")) is None
