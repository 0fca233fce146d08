"""One rank of restart.py: a small model; in the first start, rank 1 kills itself after some steps."""

import os
import signal
import sys
import time

began = time.time()

import jax  # noqa: E402  # loading these libraries is part of the measurement
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

from cyxjax.core.losses import CrossEntropyLoss  # noqa: E402
from cyxjax.core.mesh import put_replicated, put_rows  # noqa: E402
from cyxjax.core.model.adapter import adapt  # noqa: E402
from cyxjax.core.step import Batch, build_init, build_train_step  # noqa: E402
from cyxjax.distributed import process_group  # noqa: E402
from cyxjax.sync.registry import build_sync  # noqa: E402


class MLP(nn.Module):
    """784-64-10."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def note(what: str, rank: int, at_s: float) -> None:
    with open(sys.argv[1], "a") as file:
        file.write(f"{what} {rank} {at_s}\n")


def main() -> None:
    loaded = time.time()
    mesh = process_group.init().mesh
    rank, first = jax.process_index(), os.environ.get("RESTART_COUNT", "0") == "0"
    formed = time.time()
    fns, x = adapt(MLP()), np.ones((32, 784), np.float32)
    rows = put_rows(mesh, (x, np.arange(32) % 10, np.ones(32, np.float32)))
    total = put_replicated(mesh, np.float32(32 * mesh.size))
    batch = Batch(*rows, total, put_rows(mesh, np.zeros((1, 2), np.float32)))
    sync = build_sync("mean", optax.sgd(0.01), {})
    params = jax.tree.map(np.asarray, fns.init(jax.random.key(0), x[:1]))
    state = build_init(sync, mesh)(*params, 0)
    step = build_train_step(fns, CrossEntropyLoss().per_example, sync, mesh)
    for number in range(20):
        state, sums = step(state, batch)
        sums.block_until_ready()
        if number == 0 and not first:
            for what, at_s in (("began", began), ("loaded", loaded), ("formed", formed)):
                note(what, rank, at_s)
            note("stepped", rank, time.time())
        if first and rank == 1 and number == 10:
            note("killed", rank, time.time())
            os.kill(os.getpid(), signal.SIGKILL)
    process_group.finalize()


if __name__ == "__main__":
    main()
