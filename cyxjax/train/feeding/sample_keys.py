"""Adds the random keys of training samples to their inputs on the way to the device."""

from collections.abc import Callable

import numpy as np

from cyxjax.core.model.augment import Augment, keyed
from cyxjax.data.batches import HostBatch

Keying = Callable[[HostBatch, int, np.ndarray], HostBatch]
"""(batch, epoch, places of its rows in the order of that epoch) -> the batch as the step takes it."""


def unkeyed(host: HostBatch, epoch: int, places: np.ndarray) -> HostBatch:
    """Nothing is drawn for a sample alone."""
    del epoch, places
    return host


def keying_for(augment: Augment | None, seed: int) -> Keying:
    """Keys for `augment`, of a run's `seed`."""
    if augment is None:
        return unkeyed
    return lambda host, epoch, places: host._replace(inputs=keyed(host.inputs, seed, epoch, places))


def places_of_loader(host: HostBatch, rank: int, world_size: int) -> np.ndarray:
    """Places in the epoch of the rows of a loader's step, whose samples the ranks take in turn.

    Of a stream that all ranks share these are the numbers of its samples, at any number of ranks.
    """
    return host.stop - host.total + host.places * world_size + rank
