"""Functions that the ranks of the exchange tests run: the same steps, with different communication."""

import re
from typing import Any

import jax
import numpy as np
import optax

from cyxjax import distributed as dist
from cyxjax.core import exchange, replica
from cyxjax.core.mesh import local_value
from cyxjax.data.batches import BatchPlan, read_batch
from cyxjax.data.order import Order
from cyxjax.distributed.process_group import current
from tests.support.models import Net, batches_of, data, largest_gap, stepping
from tests.support.wrapped import step

STEPS, BATCH, SEED = 5, 4, 42
_SENT = re.compile(r"= (.+) (all-reduce|all-to-all|all-gather)\(")
OPTIMIZERS = {"momentum": lambda: optax.sgd(0.1, momentum=0.9), "adam": lambda: optax.adam(0.01)}


def compiled_steps(name: str, optimizer: Any) -> tuple[Any, str]:
    """(trained parameters, HLO text) of the fused step under strategy `name`."""
    samples, compiled = _dataset(current().mesh), None
    fused, state, _, _, mesh = stepping(Net(), samples, comm=name, rule=optimizer, seed=SEED)
    for batch in batches_of(samples, mesh, BATCH):
        compiled = compiled or fused.lower(state, batch).compile()
        state, _ = compiled(state, batch)
    return jax.tree.map(local_value, state.params), compiled.as_text()


def facade_steps(optimizer: Any) -> Any:
    """The same batches through `DistributedDataParallel`: the gradients travel without metrics."""
    mesh = current().mesh
    dataset, mine = _dataset(mesh), range(jax.process_index(), jax.process_index() + 1)
    plan, ddp = BatchPlan(len(dataset), BATCH, mesh.size), dist.DistributedDataParallel(Net(), seed=SEED)
    for t in range(STEPS):
        host = read_batch(dataset, Order(len(dataset), 0, 0), plan, mine, t)
        step(ddp, host, optimizer)
    return ddp.state_dict()["params"]


def sent(text: str) -> list[tuple[str, int]]:
    """(kind, number of float32 arrays) of each collective in a compiled program."""
    return [(kind, shapes.count("f32[")) for shapes, kind in re.findall(_SENT, text)]


def joined_apart_and_facade(rank, world_size, name):
    dist.init()
    assert replica.sends_one_by_one(current().mesh)
    optimizer = OPTIMIZERS[name]()
    together, text = compiled_steps("mean", optimizer)
    assert sent(text) == [("all-gather", 1)]  # one short array, gathered whole by every replica
    gathered, exchange._GATHERED_BYTES = exchange._GATHERED_BYTES, 0
    # Two replicas all-reduce a long array; three reduce-scatter it and all-gather the sums.
    in_parts, text = compiled_steps("mean", optimizer)
    exchange._GATHERED_BYTES = gathered
    assert sent(text) == ([("all-reduce", 1)] if world_size == 2 else [("all-to-all", 3), ("all-gather", 1)])
    jax.tree.map(np.testing.assert_array_equal, together, in_parts)
    if world_size == 2:  # a sum of two has no order: the rest is compared in three ranks
        return
    jax.tree.map(np.testing.assert_array_equal, together, facade_steps(optimizer))
    replica.sends_one_by_one = lambda mesh: False
    apart, text = compiled_steps("mean", optimizer)
    assert re.search(r"= \(f32.+, f32.+\) all-reduce\(", text)
    # A ring of three adds in a different order, and the two programs are fused differently: one or two
    # roundings of 6e-8 in each of 5 steps.
    assert largest_gap(together, apart) < 2e-6


def _dataset(mesh: Any) -> Any:
    return data(BATCH * mesh.size * STEPS)
