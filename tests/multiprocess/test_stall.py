"""Several CPU devices in one process, many steps queued: blocking collectives must not starve one another.

XLA sizes its thread pool by NPROC; with fewer threads than devices a queued step can hold the threads that an
earlier step waits for, and after 40 s XLA aborts the process.
"""

import pytest

from tests.support.programs import printed_by

pytestmark = pytest.mark.multiprocess

TRAIN = """
import numpy as np
import cyxjax as cx

cx.distributed.init(cpu_devices=8)
x = np.random.default_rng(0).normal(size=(6400, 16)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int32)
trainer = cx.distributed.DistributedTrainer(
    cx.get_model("mlp")(num_classes=2), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1)
)
config = cx.distributed.DistributedTrainingConfig(
    epochs=1, batch_size=2, steps_in_flight=32, verbose=False, checkpoint_every_n_epochs=0
)
print(trainer.fit(x, y, config).num_steps)
"""


def test_eight_devices_on_few_cores_finish_400_queued_steps():
    assert printed_by("-c", TRAIN).split() == ["400"]
