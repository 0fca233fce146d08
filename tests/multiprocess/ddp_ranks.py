"""Functions that the ranks of the DistributedDataParallel tests run."""

import jax
import numpy as np
import optax
import pytest
from flax import linen

from cyxjax import amp
from cyxjax import distributed as dist
from cyxjax.distributed import collectives as c
from cyxjax.errors import DesyncError
from tests.support.models import CLASSES, CRITERION, FEATURES, Dropping

ROWS, STEPS = 8, 4


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The global batch of a step: rank r of R has rows [r * ROWS / R, (r + 1) * ROWS / R)."""
    rng = np.random.default_rng(step)
    return rng.normal(size=(ROWS, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, ROWS, np.int32)


def train(ddp, rank: int, world_size: int):
    """(parameters, running statistics) after STEPS."""
    optimizer, mine = (
        optax.sgd(0.1, momentum=0.9),
        slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size),
    )
    for step in range(STEPS):
        x, y = (part[mine] for part in batch(step))
        ddp.loss(CRITERION, ddp(x), y).backward()
        ddp.update_parameters(optimizer)
    held = ddp.state_dict()
    return held["params"], held["model_state"]


def trained():
    """The number of replicas, and the result of this rank."""
    ddp = dist.DistributedDataParallel(Dropping(), seed=dist.get_rank())  # rank 0's parameters count
    held = train(ddp, dist.get_rank(), dist.get_world_size())
    return dist.get_num_replicas(), jax.tree.leaves(held)


def two_ranks(rank, world_size):
    dist.init()
    uneven_rows(rank)
    other_architecture(rank)
    compressed_and_scaled(rank, world_size)


def uneven_rows(rank):
    # loss = mean over the rank's rows of (x w)^2, x = 1 (rank 0: 3 rows of 1; rank 1: none, then 1 row of 3)
    # gradients at w = 1: rank 0: 2, rank 1: 0, then 18; means over ranks: 1, then 10
    weights = {"w": np.ones((1, 1), np.float32)}
    ddp = dist.DistributedDataParallel(
        ((lambda key, x: weights), (lambda p, x: {"loss": (x @ p["w"])[:, 0] ** 2}))
    )
    for rows, expected in ((0, 1.0), (1, 10.0)):
        x = np.ones((3, 1), np.float32) if rank == 0 else np.full((rows, 1), 3, np.float32)
        output = ddp(x)
        if len(x):
            ddp.loss(None, output).backward()
        else:
            ddp.backward({"loss": np.zeros(0, np.float32)})
        assert float(ddp.sync_gradients()["w"][0, 0]) == expected
        ddp.zero_grad()
    if rank == 0:  # only this rank evaluates
        assert ddp.eval()(np.ones((2, 1), np.float32))["loss"].shape == (2,)
    c.barrier()


def other_architecture(rank):
    ddp = dist.DistributedDataParallel(linen.Sequential([linen.Dense(16 + rank)]))
    with pytest.raises(DesyncError, match=r"layers_0/bias: float32\[16\] .*rank 0; float32\[17\] .*rank 1"):
        ddp(batch(0)[0])


def compressed_and_scaled(rank, world_size):
    """Hooks and a scaler keep ranks equal; all ranks skip a gradient that is infinite on one."""
    power = dist.PowerSGDState(matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    for state, hook in ((None, dist.bf16_compress_hook), (power, dist.powerSGD_hook)):
        ddp = dist.DistributedDataParallel(linen.Dense(CLASSES))
        ddp.register_comm_hook(state, hook)
        trained = train(ddp, rank, world_size)
        jax.tree.map(np.testing.assert_array_equal, trained, c.broadcast(trained))
    ddp, optimizer, scaler = (
        dist.DistributedDataParallel(linen.Dense(CLASSES)),
        optax.sgd(0.1),
        amp.GradScaler(init_scale=4.0),
    )
    x, y = batch(rank)
    kept = []
    for bad in (False, True, False):
        with amp.autocast():
            output = ddp(x)
        loss = ddp.loss(CRITERION, output, y)
        scaler.scale(loss * (np.inf if bad and rank == 1 else 1.0)).backward()
        kept.append(scaler.step(optimizer))
        scaler.update()
    assert kept == [True, False, True]
    assert scaler.get_scale() == 2.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ddp.parameters()))
