"""One process of a job whose state is partly spread over the processes; see test_checkpoint_processes.

Arguments: RANK WORLD PORT FOLDER save|restore
"""

import sys

import jax
import numpy as np

rank, world, port, folder, action = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)

from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from cyxjax.checkpoint.checkpointer import Checkpointer  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("data",))


def make(value: np.ndarray, spec: PartitionSpec) -> jax.Array:
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


rows = np.arange(24, dtype=np.float32).reshape(12, 2)
state = {"rows": make(rows, PartitionSpec("data")), "same": make(np.ones(5, np.float32), PartitionSpec())}

with Checkpointer(
    folder, is_writer=rank == 0, to_host=lambda leaf: multihost_utils.process_allgather(leaf, tiled=True)
) as checkpointer:
    if action == "save":
        checkpointer.save(4, state, {"world": world})
        checkpointer.wait()
        multihost_utils.sync_global_devices("saved")
    # Every process reads on its own; orbax enters no barrier.
    restored = checkpointer.restore(state)
assert restored.step == 4
assert restored.state["rows"].tobytes() == rows.tobytes()
again = make(restored.state["rows"], PartitionSpec("data"))
assert float(jax.jit(lambda x: x.sum())(again)) == rows.sum()
print("restored", restored.meta, flush=True)
multihost_utils.sync_global_devices("done")
jax.distributed.shutdown()
