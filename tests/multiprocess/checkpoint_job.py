"""One process of a job whose state is partly spread over the processes; see test_checkpoint_processes.

Arguments: RANK WORLD PORT FOLDER save|restore
"""

import json
import sys
from typing import Any

import jax
import numpy as np

rank, world, port, folder, action = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)

from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from cyxjax.checkpoint.checkpointer import Checkpointer  # noqa: E402
from cyxjax.checkpoint.writers import Writers  # noqa: E402
from cyxjax.core.portable import Share, placed  # noqa: E402
from cyxjax.distributed.agreement import Peers  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("data",))


def make(value: np.ndarray, spec: PartitionSpec) -> jax.Array:
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def exchange(what: str, note: Any) -> list[Any]:
    return [json.loads(text) for text in peers.exchange(json.dumps(note), 60.0, what)]


peers = Peers(rank, world, "save")


whole = np.arange(10, dtype=np.float32).reshape(5, 2)  # of three processes, the last holds two numbers
each = -(-whole.size // world)
rows = np.pad(whole.reshape(-1), (0, each * world - whole.size)).reshape(world, each)
span = [min(r * each, whole.size) for r in (rank, rank + 1)]
cut = Share(whole.shape, whole.dtype, *span, world == 1, (1, each), make(rows, PartitionSpec("data")))
state = {"rows": cut, "same": make(np.ones(5, np.float32), PartitionSpec())}

with Checkpointer(folder, is_writer=rank == 0, writers=Writers(rank, exchange)) as checkpointer:
    if action == "save":
        checkpointer.save(4, state, {"world": world})
    # Every process reads on its own; no barrier is entered.
    restored = checkpointer.restore(state, put=lambda want, read: placed(want, read(), mesh))
assert restored.step == 4
again = restored.state["rows"]
assert again.shape == (world, each)
assert float(jax.jit(lambda x: x.sum())(again)) == whole.sum()
print("restored", restored.meta, flush=True)
multihost_utils.sync_global_devices("done")
jax.distributed.shutdown()
