"""One rank of test_limited_memory: COMM LIMIT_BYTES WIDTH LAYERS FOLDER; its rank is in the environment.

The limit is on the private writable memory of the process (RLIMIT_DATA), libraries and threads included. A
limit on the address space would not work: jax reserves addresses that it never uses.
"""

import resource
import sys

import flax.linen as nn
import numpy as np

import cyxjax as cx
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train.trainer import DistributedTrainer

comm, limit_bytes, width, layers, folder = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(layers):
            x = nn.relu(nn.Dense(width, use_bias=False)(x))
        return nn.Dense(3)(x)


resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
trainer = DistributedTrainer(Deep(), cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-3))
inputs = np.random.default_rng(0).normal(size=(8, width)).astype(np.float32)
config = DistributedTrainingConfig(
    epochs=1,
    global_batch_size=8,
    comm=comm,
    verbose=False,
    checkpoint_every_n_epochs=1,
    checkpoint_dir=folder,
    checkpoint_async=False,  # a copy of the share would not fit
)
history = trainer.fit(inputs, np.arange(8, dtype=np.int32) % 3, config)
assert np.isfinite(history.train_losses).all()
print("trained", history.train_losses, flush=True)
