"""Host batches on the devices: as rows of one mesh, or as the parts of an exact step."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core.mesh import WrappingError, local_replicas, num_replicas, put_replicated, put_rows
from cyxjax.core.parts import Layout, Part, PartsBatch
from cyxjax.core.step import Batch
from cyxjax.data.batches import HostBatch


class Placer(Protocol):
    """Says which shares of each step this process feeds, and puts their rows on its devices."""

    num_shares: int  # what a batch plan deals a step's samples out to
    shares: Sequence[int]  # those of this process

    def put(self, host: HostBatch, signal: tuple[float, bool] = (0.0, False)) -> Any:
        """The batch that the step takes. host: rows of `shares`, in their order."""


class RowPlacer:
    """A share for each replica; what is the same in every full batch is put on the mesh once."""

    shares: Sequence[int]

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self.num_shares, self.shares = num_replicas(mesh), local_replicas(mesh)
        self._kept: dict[tuple, jax.Array] = {}

    def put(self, host: HostBatch, signal: tuple[float, bool] = (0.0, False)) -> Batch:
        rows = len(host.weight)
        full = host.weight.all()
        try:
            parts = put_rows(self._mesh, (host.inputs, host.targets) if full else host[:3])
        except WrappingError as error:
            raise (error if host.ids is None else error.at(f"sample {host.ids[error.row]}")) from None
        weight = (
            self._once(("weight", rows), lambda: self._rows(np.ones(rows, np.float32))) if full else parts[2]
        )
        total = self._once(("total", host.total), lambda: put_replicated(self._mesh, np.float32(host.total)))
        local = len(self.shares)
        asked = self._once(
            ("signal", signal), lambda: self._rows(np.tile(np.array(signal, np.float32), (local, 1)))
        )
        return Batch(parts[0], parts[1], weight, total, asked)

    def _rows(self, array: np.ndarray) -> jax.Array:
        return put_rows(self._mesh, array)

    def _once(self, name: tuple, make: Callable[[], jax.Array]) -> jax.Array:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


class PartPlacer:
    """A share for each part of an exact step; the rows stay numpy until their program is called."""

    shares: Sequence[int]

    def __init__(self, layout: Layout):
        self._layout = layout
        self.num_shares = layout.num_parts
        self.shares = [number for parts in layout.parts for number in parts]

    def put(self, host: HostBatch, signal: tuple[float, bool] = (0.0, False)) -> PartsBatch:
        rows = self._cut(host)
        parts = [[next(rows) for _ in numbers] for numbers in self._layout.parts]
        return PartsBatch(parts, np.float32(host.total), np.array(signal, np.float32))

    def _cut(self, host: HostBatch) -> Iterator[Part]:
        size = len(host.weight) // len(self.shares)
        for number, start in zip(self.shares, count(step=size)):
            mine = slice(start, start + size)
            cut = jax.tree.map(lambda a, mine=mine: np.asarray(a)[mine], tuple(host[:3]))
            yield Part(np.int32(number), *cut)
