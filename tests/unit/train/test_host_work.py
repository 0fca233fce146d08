"""The host's work per step beside the compiled program, in function calls: times are too noisy."""

import numpy as np
from flax import linen as nn

import cyxjax as cx
from tests.support.calls import calls_of

# Python and C functions a step on two devices: 139 when this was written, 169 if `device_put` puts a batch.
_MOST_CALLS = 150


def calls_in_fit(trainer, x, max_steps):
    """The number of function calls on this thread, until `max_steps` steps are done over all fits."""
    config = cx.distributed.DistributedTrainingConfig(
        epochs=10**6, batch_size=4, max_steps=max_steps, verbose=False, checkpoint_every_n_epochs=0
    )
    return calls_of(lambda: trainer.fit(x, np.zeros(len(x), np.int32), config))


def calls_a_step(num_samples):
    x = np.zeros((num_samples, 2), np.float32)
    trainer = cx.distributed.DistributedTrainer(nn.Dense(2), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    calls_in_fit(trainer, x, 2)  # warm-up
    # 20 and 120 steps, which end within an epoch and read the rest of it in the same number of blocks.
    few, many = calls_in_fit(trainer, x, 22), calls_in_fit(trainer, x, 142)
    return (many - few) / 100


def test_a_step_costs_the_host_few_calls_and_as_many_whatever_the_size_of_the_data(two_devices):
    small, large = calls_a_step(1_000), calls_a_step(100_000)
    assert small < _MOST_CALLS
    assert large <= 1.1 * small
