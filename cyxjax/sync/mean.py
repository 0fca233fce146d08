"""The plain mean of every gradient in its own dtype, as in DDP: in one exchange, or in buckets."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cyxjax.core.exchange import raveled
from cyxjax.core.replica import pmean
from cyxjax.core.strategy import Reducer, Sync, reduce_then
from cyxjax.core.trees import PyTree
from cyxjax.sync.entry import Exchange, Strategy


def mean_reducer() -> Reducer:
    """Averages gradients over axis `data`. Stateless; how leaves share a transfer: `core/exchange.py`."""
    return optax.stateless(lambda grads, params: pmean(grads))


def mean(optimizer: optax.GradientTransformation) -> Sync:
    return reduce_then(mean_reducer(), optimizer)


_MB = 1024 * 1024


def bucketed(optimizer: optax.GradientTransformation, bucket_size_mb: float = 25.0) -> Sync:
    """Averages gradients over axis `data`, one reduction per `bucket_size_mb` MiB, last layers first.

    Each bucket is one flat buffer and holds whole leaves, so a larger leaf is a bucket alone. On
    GPU `mean` has buckets without this: the option xla_gpu_all_reduce_combine_threshold_bytes.
    """

    def update(grads: PyTree, params: PyTree = None) -> PyTree:
        leaves, tree = jax.tree.flatten(grads)
        means: list[Any] = [None] * len(leaves)
        last = jnp.float32(0)
        for bucket in buckets([leaf.size * leaf.dtype.itemsize for leaf in leaves], bucket_size_mb * _MB):
            flat, unravel = raveled([leaves[i] for i in bucket])
            # XLA joins independent reductions, so each is made to depend on the one before, in a way that XLA
            # cannot simplify: no number is both NaN and 0. (XLA drops optimization_barrier too early.)
            flat = jnp.where(jnp.isnan(last) & (last == 0), jnp.zeros_like(flat), flat)
            mean = pmean(flat)
            last = mean[0] if flat.size else last
            for i, leaf in zip(bucket, unravel(mean), strict=True):
                means[i] = leaf
        return jax.tree.unflatten(tree, means)

    return reduce_then(optax.stateless(update), optimizer)


def buckets(leaf_bytes: Sequence[int], limit_bytes: float) -> list[list[int]]:
    """Leaf indices by bucket, the last leaf first: backward computes those gradients first."""
    found: list[list[int]] = []
    room = 0.0
    for i in reversed(range(len(leaf_bytes))):
        if not found or leaf_bytes[i] > room:
            found.append([])
            room = limit_bytes
        found[-1].append(i)
        room -= leaf_bytes[i]
    return found


ENTRIES = {
    "mean": Strategy(
        mean,
        ("about 2P(R-1)/R, in one exchange", "none", "the default: one machine, a fast network"),
        learns=None,  # the others are compared with it
        sends=lambda params, size: [Exchange(True, size)],
        in_memory_plan=True,
    ),
    "bucketed": Strategy(
        bucketed,
        ("the same, in reductions of `bucket_size_mb`", "none", "a bounded buffer"),
        learns=None,  # the parameters of `mean`: tests/device/test_sync_contract.py
        lossless={"bucket_size_mb": 50 / 2**20},  # 50 bytes: one leaf a bucket
    ),
}
