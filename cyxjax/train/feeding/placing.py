"""Puts host batches on the devices, as rows of one mesh or as the parts of an exact step; samples that are
augmented take their random keys along."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core.exact.calls import Parts
from cyxjax.core.exact.step import Layout, PartsBatch
from cyxjax.core.mesh import build_put_rows, local_replicas, num_replicas, put_replicated, refuse_wrapping
from cyxjax.core.model.augment import Augment, keyed
from cyxjax.core.step import Batch
from cyxjax.data.batches import HostBatch
from cyxjax.launch.backend import jax_private


class Placer(Protocol):
    """Says which shares of each step this process feeds, and puts their rows on its devices."""

    num_shares: int  # what a batch plan deals a step's samples out to
    shares: Sequence[int]  # those of this process

    def put(self, host: HostBatch, signal: tuple[float, bool] = (0.0, False)) -> Any:
        """The batch that the step takes. host: rows of `shares`, in their order."""


def _rows_of(host: HostBatch) -> dict[str, Any]:
    return {"inputs": host.inputs, "targets": host.targets, "weight": host.weight}


class RowPlacer:
    """A share for each replica; what is the same in every full batch is put on the mesh once.

    unpadded: on one replica a short batch has its own size; a program is compiled for it.
    """

    shares: Sequence[int]

    def __init__(self, mesh: Mesh, *, unpadded: bool = False):
        self._unpadded = unpadded and num_replicas(mesh) == 1
        self._mesh, self._put_rows = mesh, build_put_rows(mesh, jax_private.shard_putter())
        self.num_shares, self.shares = num_replicas(mesh), local_replicas(mesh)
        self._kept: dict[tuple, tuple[jax.Array, ...]] = {}

    def put(self, host: HostBatch, signal: tuple[float, bool] = (0.0, False)) -> Batch:
        if self._unpadded and host.total < len(host.weight):  # padding comes last
            host = host._replace(**jax.tree.map(lambda a: a[: host.total], _rows_of(host)))
        rows = len(host.weight)
        full = rows * self.num_shares == host.total * len(self.shares) or host.weight.all()
        parts = self._put_rows((host.inputs, host.targets) if full else host[:3])
        same = self._kept.get((rows, host.total, signal)) or self._keep(rows, host.total, signal)
        return Batch(parts[0], parts[1], same[0] if full else parts[2], same[1], same[2])

    def _keep(self, rows: int, total: int, signal: tuple[float, bool]) -> tuple[jax.Array, ...]:
        """(weights of `rows` samples, `total`, `signal`) on the mesh."""
        asked = np.tile(np.array(signal, np.float32), (len(self.shares), 1))
        weight, asked = self._put_rows((np.ones(rows, np.float32), asked))
        self._kept[rows, total, signal] = weight, put_replicated(self._mesh, np.float32(total)), asked
        return self._kept[rows, total, signal]


class PartPlacer:
    """A share for each part of an exact step; the rows stay numpy until their program is called."""

    shares: Sequence[int]

    def __init__(self, layout: Layout):
        self._layout = layout
        self.num_shares = layout.num_parts
        self.shares = [number for parts in layout.parts for number in parts]

    def put(self, host: HostBatch, signal: tuple[float, bool] = (0.0, False)) -> PartsBatch:
        refuse_wrapping((host.inputs, host.targets))
        size = len(host.weight) // len(self.shares)
        cut = jax.tree.map(lambda a: np.asarray(a).reshape(-1, size, *a.shape[1:]), tuple(host[:3]))
        starts = accumulate(map(len, self._layout.parts), initial=0)
        parts = [
            self._of(numbers, start, cut) for numbers, start in zip(self._layout.parts, starts, strict=False)
        ]
        return PartsBatch(parts, np.float32(host.total), np.array(signal, np.float32))

    def _of(self, numbers: range, start: int, cut: tuple) -> Parts:
        """The parts of a device, from those of all."""
        mine = slice(start, start + len(numbers))
        return Parts(np.array(numbers, np.int32), *jax.tree.map(lambda a: a[mine], cut))


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
