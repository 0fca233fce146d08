"""Functions that the ranks of the multiprocess tests run; spawned processes import them from here."""

import os
import re
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax import distributed as dist
from cyxjax.distributed import collectives as c
from cyxjax.errors import DesyncError, GroupError
from cyxjax.launch.backend import jax_private

DTYPES = ("bfloat16", "float16", "float32", "int8", "uint8", "int32", "uint32", "bool", "int64", "float64")


def values(rank, world_size):
    """Checks every collective; rank 1 leaves last."""
    dist.init_process_group()
    reductions(rank, world_size)
    movements(rank, world_size)
    if rank == 1:
        real = jax_private.shut_down_client
        jax_private.shut_down_client = lambda: (time.sleep(1), real())  # rank 0 has ended long before


def errors(rank, world_size):
    """Checks calls that differ or come late, after which the group still works."""
    dist.init_process_group()
    for call, message in DIFFERENT:
        with pytest.raises(DesyncError, match=re.escape(message)):
            call(rank)
    assert float(c.all_reduce(1.0)) == world_size
    c.barrier("first")
    start = time.monotonic()
    if rank == 1:
        time.sleep(2)
    with pytest.raises(GroupError, match=r"barrier\('late'\): rank 1 of"):
        c.barrier("late", timeout=0.5)
    assert time.monotonic() - start < 30
    assert float(c.all_reduce(1.0)) == world_size  # late or not, ranks meet again in the next call


def reductions(rank, world_size):
    # ranks 0, 1 (, 2) hold 1, 2 (, 3): no two reductions of these agree for 3 ranks
    x = {name: [np.full((2, 3), rank + 1, jnp.dtype(name)), np.zeros((), jnp.dtype(name))] for name in DTYPES}
    values = range(1, world_size + 1)
    expected = {"SUM": sum(values), "MAX": max(values), "MIN": min(values), "PRODUCT": int(np.prod(values))}
    for op, number in expected.items():
        for name, (got, zero) in c.all_reduce(x, c.ReduceOp[op]).items():
            assert (got.dtype, zero.shape) == (jnp.dtype(name), ())
            np.testing.assert_array_equal(got, np.full((2, 3), number, jnp.dtype(name)))
    for name, (mean, _) in c.reduce_tensor(x).items():
        wanted = 1.0 if name == "bool" else sum(values) / world_size
        np.testing.assert_array_equal(np.asarray(mean, np.float64), np.full((2, 3), wanted))
    one_is_nan = np.full(30_000, np.nan if rank == 1 else 1, np.float32)
    assert np.isnan(c.all_reduce(one_is_nan, c.ReduceOp.MAX)).all()  # gloo's maximum loses it
    assert (c.reduce_tensor(np.full(2, 60_000, np.float16)) == 60_000).all()  # the sum is beyond float16
    assert c.reduce(1.5, dst=1) == (1.5 * world_size if rank == 1 else None)
    assert float(c.all_reduce(2.0**40 + rank)) == world_size * 2.0**40 + world_size * (world_size - 1) / 2


def movements(rank, world_size):
    special = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
    special_bits = special.view(np.uint32).copy()
    special_bits[1] |= 7  # a NaN with a payload
    got = c.broadcast(special_bits.view(np.float32) if rank == 1 else special * 0, src=1)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), special_bits)
    big = np.int64(2**40 + rank)
    assert [int(v) for v in c.all_gather({"n": big})[-1].values()] == [2**40 + world_size - 1]
    rows = c.gather(jnp.float32(rank), dst=0)
    assert rows is None if rank else [float(v) for v in rows] == list(range(world_size))
    items = [{"x": np.full(2, i, np.float32), "y": (np.bool_(i),)} for i in range(world_size)]
    mine = c.scatter(items if rank == 1 else None, src=1)
    np.testing.assert_array_equal(mine["x"], [rank, rank])
    assert bool(mine["y"][0]) == bool(rank)
    # rank r sends 10 i + r to rank i, so rank i gets 10 i + 0, 10 i + 1, ...
    sent = [np.full(2, 10.0 * i + rank, np.float32) for i in range(world_size)]
    np.testing.assert_array_equal(c.all_to_all(sent), [[10.0 * rank + r] * 2 for r in range(world_size)])
    np.testing.assert_array_equal(c.reduce_scatter(sent, c.ReduceOp.MAX), 10 * rank + world_size - 1)
    assert c.broadcast_object({"a": [np.int64(1), "x"]} if rank == 0 else None) == {"a": [1, "x"]}
    assert c.all_gather_object("r" * rank) == ["r" * r for r in range(world_size)]


DIFFERENT = [  # calls of the ranks, and the error message on every rank
    (
        lambda rank: c.all_reduce({"w": np.zeros(3 + rank, np.float32)}),
        "float32[3] on rank 0; float32[4] on rank 1",
    ),
    (lambda rank: c.broadcast({"w": 1.0} if rank else {"v": 1.0}), "float64[] on rank 0; (none) on rank 1"),
    (lambda rank: c.all_reduce(np.int32(rank) if rank else 1.0), "float64[] on rank 0; int32[] on rank 1"),
    (lambda rank: c.all_reduce("text" if rank else 1.0), "float64[] on rank 0; <U4[] on rank 1"),
    (
        lambda rank: c.all_reduce(1.0) if rank else c.broadcast(1.0),
        "broadcast(src=0) on rank 0; all_reduce(SUM) on rank 1",
    ),
    (
        lambda rank: c.all_reduce(1.0, c.ReduceOp.MAX if rank else c.ReduceOp.MIN),
        "all_reduce(MIN) on rank 0; all_reduce(MAX) on rank 1",
    ),
]


LONG = 100_000 * "x"  # more than a pipe holds


def fail_on(rank, world_size, which):
    """The others are in a compiled reduction meanwhile, whose transport then fails."""
    dist.init_process_group()
    assert float(c.all_reduce(1.0)) == world_size
    if rank == which:
        raise ValueError(f"rank {rank} does not like this: {LONG}")
    c.agree = lambda *args, **options: None  # not the agreement before it
    c.all_reduce(np.ones(1))


def end_without_a_word(rank, world_size):
    if rank == 0:
        os._exit(7)
    time.sleep(60)


def train_slowly(rank, world_size, folder):
    dist.init_process_group()

    class Slow(cx.Callback):
        def on_step(self, info):
            time.sleep(0.02)
            if info.position.step == 3:
                Path(folder, f"rank_{rank}").touch()

    one = cx.DistributedTrainer(
        cx.get_model("mlp")(), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1), callbacks=[Slow()]
    )
    x, y = np.ones((4000, 8), np.float32), np.zeros(4000, np.int32)
    one.fit(x, y, epochs=1, batch_size=2, checkpoint_dir=f"{folder}/checkpoints", verbose=False)


if __name__ == "__main__":  # a program that trains in two processes of its own
    dist.spawn(train_slowly, (sys.argv[1],), nprocs=2)
