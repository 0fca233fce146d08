"""The position of a sample in its step, and the keys of random draws, which depend on it.

A step's global batch is divided over R replicas with stride R; each takes B rows at a time, micro-batch by
micro-batch. The key of a model's random draws depends on the seed, the step and the position of the
micro-batch's first sample, never on a rank or a device alone. The key of draws for one sample (augmentation)
depends on the seed, the epoch and the sample's position in the epoch's order, whatever the batch size.
"""

from typing import Any

import jax
import numpy as np

_OF_SAMPLES = 2**32 - 1  # a step that no run reaches, so that no sample's key is derived from a step's key


def place_in_step(row: Any, micro: Any, replica: Any, *, rows: int, num_replicas: int) -> Any:
    """Position in the step's order of a replica's `row` in micro-batch `micro`; integers or arrays of them.

    rows: of a replica's micro-batch, B. Rows of one replica are R apart, so that replicas differ by at most
    one real sample in a short batch, and a micro-batch holds the same samples at any number of replicas.
    """
    return micro * (rows * num_replicas) + row * num_replicas + replica


def step_key(key_data: Any, step: Any) -> jax.Array:
    """The key of optimizer step `step`, counted from 0; key_data: the run's, uint32."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), step)


def micro_batch_key(key: jax.Array, micro: Any, replica: Any, *, rows: int, num_replicas: int) -> jax.Array:
    """The key of one replica's micro-batch in the step of `key`."""
    first = place_in_step(0, micro, replica, rows=rows, num_replicas=num_replicas)
    return jax.random.fold_in(key, first)


def sample_words(seed: int, epoch: int, places: np.ndarray) -> np.ndarray:
    """Words that determine the keys of the samples at `places` in the order of `epoch`: uint32 (rows, 3)."""
    words = np.empty((len(places), 3), np.uint32)
    words[:, 0], words[:, 1], words[:, 2] = seed, epoch, places
    return words


def sample_key(words: Any) -> jax.Array:
    """The key of one sample's draws. words: a row of `sample_words`.

    Always a threefry key: with other kinds, draws under `vmap` depend on the neighbouring samples.
    """
    seed, epoch, place = words
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _OF_SAMPLES)
    return jax.random.fold_in(jax.random.fold_in(key, epoch), place)
