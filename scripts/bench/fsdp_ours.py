"""One process of fsdp.py: one strategy; rank 0 prints a JSON line with the measured numbers."""

import json
import resource
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.mesh import put_replicated, put_rows
from cyxjax.core.model.adapter import adapt
from cyxjax.core.portable import build_draw
from cyxjax.core.step import Batch, build_train_step
from cyxjax.distributed import process_group
from cyxjax.models.gpt import GPT
from cyxjax.sync.registry import build_sync


def main() -> None:
    task = json.loads(sys.argv[1])
    mesh = process_group.init().mesh
    length, rows = task["length"], task["batch"]
    model = GPT(
        vocab_size=task["vocab"],
        context_length=length,
        num_layers=task["layers"],
        num_heads=task["heads"],
        width=task["width"],
    )
    fns, rng = adapt(model), np.random.default_rng(jax.process_index())
    tokens = rng.integers(0, task["vocab"], (rows, length)).astype(np.int32)
    here = put_rows(mesh, (tokens, np.roll(tokens, -1, 1), np.ones(rows, np.float32)))
    total = put_replicated(mesh, np.float32(rows * mesh.size))
    batch = Batch(*here, total, put_rows(mesh, np.zeros((1, 2), np.float32)))
    shapes = jax.eval_shape(fns.init, jax.random.key(0), tokens[:1])[0]
    sync = build_sync(task["comm"], optax.adam(1e-3), task["options"], params=lambda: shapes)
    state = build_draw(fns, sync, mesh)(np.uint32(0), tokens[:1])
    step: Any = build_train_step(fns, as_per_example(CrossEntropyLoss()), sync, mesh)

    def timed(count: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(count):
            state, sums = step(state, batch)
            sums.block_until_ready()
        return time.perf_counter() - started

    timed(2)  # compiles and opens connections
    steps = int(multihost_utils.broadcast_one_to_all(np.int32(max(2, min(200, task["seconds"] / timed(1))))))
    cpu_s, wall_s = time.process_time(), timed(steps)
    found = {
        "tokens_per_s": steps * rows * length * mesh.size / wall_s,
        "cpu_s": (time.process_time() - cpu_s) / steps,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "params": sum(leaf.size for leaf in jax.tree.leaves(shapes)),
    }
    if process_group.is_master():
        print(json.dumps(found), flush=True)
    process_group.finalize()


if __name__ == "__main__":
    main()
