"""A rank of test_programs.py: fits (MODE: none or exact) and prints its compile requests and cache hits."""

import collections
import hashlib
import json
import os

import jax
import numpy as np
from flax import linen

import cyxjax as cx

events: collections.Counter[str] = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))

config = cx.distributed.DistributedTrainingConfig(
    epochs=2,
    global_batch_size=16,
    virtual_replicas=2,
    reproducibility=os.environ["MODE"],
    max_grad_norm=1.0,
    checkpoint_every_n_epochs=0,
    verbose=False,
)
cx.distributed.init(threads=config.pool_threads)
model = linen.Dense(3)
trainer = cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
rng = np.random.default_rng(0)
trainer.fit(rng.normal(size=(40, 5)).astype(np.float32), rng.integers(0, 3, 40), config)
params = jax.tree.leaves(trainer.params)
print(
    "SAID",
    json.dumps(
        {
            "bits": hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in params)).hexdigest(),
            "asked": events["compile_requests_use_cache"],
            "found": events["cache_hits"],
        }
    ),
    flush=True,
)
cx.distributed.finalize()
