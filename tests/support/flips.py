"""A simulated bit flip on one device."""

import jax
import numpy as np


def flip(array, replica, bit, element=0):
    """`array` with one bit of one element changed on one replica; jax still treats it as replicated."""
    parts = []
    for i, shard in enumerate(sorted(array.addressable_shards, key=lambda s: s.device.id)):
        raw = np.array(shard.data, copy=True)
        if i == replica:
            words = raw.reshape(-1).view(f"u{raw.dtype.itemsize}")
            words[element] ^= words.dtype.type(1 << bit)
        parts.append(jax.device_put(raw, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
