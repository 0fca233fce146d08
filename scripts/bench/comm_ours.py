"""One process of comm.py: each strategy in turn; rank 0 prints a JSON line [row, samples/s] for each."""

import json
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import multihost_utils

from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.mesh import put_replicated, put_rows
from cyxjax.core.model.adapter import adapt
from cyxjax.core.step import Batch, build_init, build_train_step
from cyxjax.distributed import process_group
from cyxjax.sync.registry import build_sync


class MLP(nn.Module):
    """784-2048-2048-10: 5.8 M parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (2048, 2048):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


def samples_per_s(name: str, options: dict[str, Any], batch_size: int, seconds: float, mesh: Any) -> float:
    fns, rng = adapt(MLP()), np.random.default_rng(jax.process_index())
    x = rng.normal(size=(batch_size, 784)).astype(np.float32)
    rows = put_rows(mesh, (x, np.arange(batch_size) % 10, np.ones(batch_size, np.float32)))
    total = put_replicated(mesh, np.float32(batch_size * mesh.size))
    batch = Batch(*rows, total, put_rows(mesh, np.zeros((1, 2), np.float32)))
    sync = build_sync(name, optax.sgd(0.01), options)
    params = jax.tree.map(np.asarray, fns.init(jax.random.key(0), x[:1]))
    state = build_init(sync, mesh)(*params, 0)
    step = build_train_step(fns, CrossEntropyLoss().per_example, sync, mesh)

    def timed(count: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for i in range(count):
            state, sums = step(state, batch)
            if i % 4 == 3:
                sums.block_until_ready()  # few steps in flight, as in training
        sums.block_until_ready()
        return time.perf_counter() - started

    round_steps = options.get("every", 1)
    timed(round_steps)  # compiles and opens connections
    each = timed(round_steps)
    rounds = int(multihost_utils.broadcast_one_to_all(np.int32(max(2, min(200, seconds / each)))))
    return rounds * round_steps * batch_size * mesh.size / timed(rounds * round_steps)


def main() -> None:
    task = json.loads(sys.argv[1])
    mesh = process_group.init().mesh
    for row, (name, options) in task["rows"].items():
        rate = samples_per_s(name, options, task["batch"], task["seconds"], mesh)
        if process_group.is_master():
            print(json.dumps([row, rate]), flush=True)
    process_group.finalize()


if __name__ == "__main__":
    main()
