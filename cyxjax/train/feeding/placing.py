"""Puts host batches on the devices, as rows of one mesh or as the parts of an exact step; samples to be
augmented carry their random keys."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core.exact.calls import Parts
from cyxjax.core.exact.step import Layout, PartsBatch
from cyxjax.core.mesh import build_put_rows, local_replicas, num_replicas, put_replicated, refuse_wrapping
from cyxjax.core.model.augment import Augment, keyed
from cyxjax.core.step import Batch
from cyxjax.data.batches import HostBatch, HostBlock
from cyxjax.launch.backend import jax_private

Signal = tuple[float, bool]
"""What this process asks all processes for with a step: (stop, as a strength; whether to save)."""
NO_SIGNAL: Signal = (0.0, False)


class RowPlacer:
    """One share per replica; arrays that are the same in every full batch are put on the mesh once.

    unpadded: on one replica, a short batch keeps its own size; a separate program is compiled for it.
    """

    def __init__(self, mesh: Mesh, *, unpadded: bool = False):
        self._unpadded = unpadded and num_replicas(mesh) == 1
        put_shards = jax_private.shard_putter()
        self._mesh, self._put_rows = mesh, build_put_rows(mesh, put_shards)
        self._put_steps = build_put_rows(mesh, put_shards, dim=1)
        self.num_shares, self.shares = num_replicas(mesh), local_replicas(mesh)
        self._kept: dict[tuple, tuple[jax.Array, ...]] = {}

    def put(self, host: HostBatch, signal: Signal = NO_SIGNAL) -> Batch:
        """The batch that the step takes. host: rows of `shares`, in their order."""
        if self.has_own_size(host):  # padding comes last
            inputs, targets, weight = jax.tree.map(lambda a: a[: host.total], host[:3])
            host = host._replace(inputs=inputs, targets=targets, weight=weight)
        rows = len(host.weight)
        # Ranks may have different numbers of rows, so the total does not say whether this one's have padding.
        parts = self._put_rows((host.inputs, host.targets) if host.weight.all() else host[:3])
        same = self._kept.get((rows, host.total, signal)) or self._keep((rows,), host.total, signal)
        return Batch(*parts, *same[len(parts) - 2 :])

    def put_steps(self, block: HostBlock, count: int, signal: Signal = NO_SIGNAL) -> Batch:
        """The batches of `count` steps for one dispatch; `block` holds their rows, one step after another.

        The signal goes with the first step.
        """
        last, rows = block.steps[-1], block.rows
        refuse_wrapping((rows.inputs, rows.targets))  # here a row is still a sample
        shape = count, len(last.weight)
        parts = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), rows[:3])
        if shape[1] * self.num_shares == last.total * len(self.shares):  # full on all processes
            same = self._kept.get((*shape, last.total, signal)) or self._keep(shape, last.total, signal)
            inputs, targets = self._put_steps(parts[:2])
            return Batch(inputs, targets, *same)
        totals = np.zeros(count, np.float32)
        totals[: len(block.steps)] = [step.total for step in block.steps]
        inputs, targets, weight, asked = self._put_steps((*parts, self._asked(shape[:1], signal)))
        return Batch(inputs, targets, weight, put_replicated(self._mesh, totals), asked)

    def has_own_size(self, host: HostBatch) -> bool:
        """Whether a step's batch is put without padding, and therefore with fewer rows than others."""
        return self._unpadded and host.total < len(host.weight)

    def _asked(self, steps: tuple[int, ...], signal: Signal) -> np.ndarray:
        """`signal` of each share of this process, float32 (*steps, shares, 2), in the first step only."""
        asked = np.zeros((*steps, len(self.shares), 2), np.float32)
        asked.reshape(-1, len(self.shares), 2)[0] = signal
        return asked

    def _keep(self, shape: tuple[int, ...], total: int, signal: Signal) -> tuple[jax.Array, ...]:
        """(weights of samples, `total`, `signal`) on the mesh; shape: (rows,), or (steps, rows)."""
        put = self._put_rows if len(shape) == 1 else self._put_steps
        weight, asked = put((np.ones(shape, np.float32), self._asked(shape[:-1], signal)))
        totals = put_replicated(self._mesh, np.full(shape[:-1], total, np.float32))
        self._kept[*shape, total, signal] = weight, totals, asked
        return weight, totals, asked


class PartPlacer:
    """One share per part of an exact step; the rows stay NumPy arrays until their program is called."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self.num_shares = layout.num_parts
        self.shares = [number for parts in layout.parts for number in parts]

    def put(self, host: HostBatch, signal: Signal = NO_SIGNAL) -> Any:
        """The `PartsBatch` that the step takes. host: rows of `shares`, in their order."""
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


Placer = RowPlacer | PartPlacer
"""Says which `shares`, of `num_shares`, of a step this process feeds, and puts their rows on its devices."""

Keying = Callable[[HostBatch, int], HostBatch]
"""(batch, epoch) -> the batch as the step takes it."""


def unkeyed(host: HostBatch, epoch: int) -> HostBatch:
    """Returns `host`: no random values are drawn per sample."""
    return host


def keying_for(augment: Augment | None, seed: int) -> Keying:
    """The keying for `augment`, from a run's `seed`."""
    if augment is None:
        return unkeyed
    return lambda host, epoch: host._replace(inputs=keyed(host.inputs, seed, epoch, host.places))
