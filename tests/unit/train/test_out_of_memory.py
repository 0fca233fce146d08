"""A step that needs more memory than there is: the error names this run's numbers and four remedies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import MSELoss
from cyxjax.errors import OutOfMemoryError
from cyxjax.train.out_of_memory import advice, explained
from cyxjax.train.settings import resolve
from cyxjax.train.trainer import DistributedTrainer

HUGE = 2**42


def test_a_step_too_large_for_this_machine(tmp_path):
    def apply(params, x):
        rows = jnp.broadcast_to(x[:, :1] * params["w"][0, 0], (x.shape[0], HUGE))
        return x @ params["w"] + jnp.cumsum(rows, axis=1)[:, -1:]

    model = (lambda key, x: {"w": jnp.ones((x.shape[1], 1))}, apply)
    trainer = DistributedTrainer(model, MSELoss(), optax.sgd(0.1))
    x, y = np.ones((64, 3), np.float32), np.ones((64, 1), np.float32)
    config = DistributedTrainingConfig(batch_size=4, epochs=1, checkpoint_dir=str(tmp_path), verbose=False)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.fit(x, y, config)
    text = str(caught.value)
    assert "Out of memory allocating" in text
    assert "batch_size 4, gradient_accumulation_steps 1, remat none, float32, on 8 replicas" in text
    assert (
        "the same 32 samples a step in smaller parts: batch_size: 2 with gradient_accumulation_steps: 2"
        in text
    )
    assert text.count("\n  ") == 4


def test_remedies_already_taken_are_said_to_be():
    config = DistributedTrainingConfig(batch_size=1, remat="full", precision="bfloat16")
    text = advice(resolve(config, 2).step, 2)
    assert "batch_size is 1 already" in text
    assert "gradient checkpointing is on (remat: full)" in text
    assert "half precision is on (precision: bfloat16)" in text


def test_other_errors_pass_unchanged():
    other = pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL")
    with other, explained(resolve(DistributedTrainingConfig(), 1).step, 1):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
