"""Gradients of at most a norm, as `max_grad_norm` asks for them."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def shortened(grads: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    """`grads`, of norm `norm` over all replicas, multiplied so that it is at most `max_norm`.

    Below it they keep their bits. By one factor: optax divides each number by the norm (the last bit may
    differ), and XLA, which multiplies where the optimizer reads, keeps what it divides in arrays of its own.
    Source: optax.clip_by_global_norm.
    """
    factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
