"""DistributedSampler with an order that is computed, not stored, and loaders for every process."""

from collections.abc import Iterator, Sized
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from cyxjax.data.loader import DataLoader
from cyxjax.data.order import Order, Places
from cyxjax.data.sources import as_dataset
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, DataError
from cyxjax.launch.topology import Topology


class DistributedSampler:
    """Indices of one rank: positions rank, rank + W, rank + 2W, ... of the epoch's order, as in torch.

    With `shuffle=False` the indices equal torch's exactly, padding included: without `drop_last` the order
    wraps around until every rank has the same number, so at most W - 1 of all indices are repeats (of one
    sample, if there is only one); with `drop_last` its tail is left out. (The trainer needs neither: it
    weights padding with 0, see `cyxjax.data.BatchPlan`.) The shuffle differs from torch's and depends on
    (seed, epoch): call `set_epoch` every epoch.
    """

    def __init__(
        self,
        dataset_size: int | Sized | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset: Sized | None = None,
    ) -> None:
        """`dataset_size` is a number of samples or a dataset with a length (also as `dataset=`).

        `num_replicas` and `rank` default to the process group's world size and rank; 1 and 0 without one.
        """
        place = process_group.current().topology if process_group.is_initialized() else Topology()
        self.num_replicas = place.world_size if num_replicas is None else num_replicas
        self.rank = place.rank if rank is None else rank
        self.shuffle, self.seed, self.drop_last = shuffle, int(seed), drop_last
        self.epoch = 0
        size: Any = dataset if dataset_size is None else dataset_size
        size = as_dataset(size) if isinstance(size, tuple | dict) else size
        self._size = len(size) if isinstance(size, Sized) else int(size)
        Order(self._size, self.seed, 0, shuffle)  # raises an error where there is no order
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                f"rank={self.rank} is outside [0, num_replicas={self.num_replicas}). "
                "HINT: leave both out to take them from the process group."
            )

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch whose order the next pass has, the same on every rank; immediate at any size."""
        self.epoch = int(epoch)

    @property
    def _order(self) -> Order:
        """The order by the current attributes: a change takes effect with the next pass."""
        return Order(self._size, self.seed, self.epoch, self.shuffle)

    def get_indices(self, start: int = 0, stop: int | None = None) -> Places:
        """This rank's indices in order, int64, shape (local_size(),); or those from `start` to `stop`."""
        return self._order[self._positions(start, stop)]

    def local_size(self) -> int:
        """Indices this rank gets per epoch; the same on every rank."""
        return (self._size + (0 if self.drop_last else self.num_replicas - 1)) // self.num_replicas

    def total_size(self) -> int:
        """Samples in the dataset. (torch's attribute of this name is `padded_size()` here.)"""
        return self._size

    def padded_size(self) -> int:
        """Indices per epoch over all ranks: local_size() * num_replicas."""
        return self.local_size() * self.num_replicas

    def __len__(self) -> int:
        return self.local_size()

    def __iter__(self) -> Iterator[int]:
        """One pass over this rank's indices, as Python integers, computed a block at a time."""
        order = self._order  # of this epoch, even if set_epoch is called during the pass
        starts = range(0, self.local_size(), _BLOCK)
        return chain.from_iterable(order[self._positions(i, i + _BLOCK)].tolist() for i in starts)

    def _positions(self, start: int, stop: int | None) -> Places:
        """Places of this rank's `start`-th to `stop`-th index; padding wraps to the order's beginning."""
        local = np.arange(*slice(start, stop).indices(self.local_size()), dtype=np.int64)
        return (local * self.num_replicas + self.rank) % self._size

    def state_dict(self) -> dict[str, Any]:
        """What determines the order. It holds no rank and no world size: those may change on resume."""
        return {
            "dataset_size": self._size,
            "seed": self.seed,
            "epoch": self.epoch,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the order of `state`. Raises: DataError if the size of the dataset has changed."""
        if state["dataset_size"] != self._size:
            raise DataError(
                f"the sampler state is of {state['dataset_size']} samples but the dataset has {self._size}. "
                "HINT: resume with the data the run began with, or start a new run."
            )
        self.seed, self.shuffle, self.drop_last = state["seed"], state["shuffle"], state["drop_last"]
        self.set_epoch(state["epoch"])


class DistributedBatchIterator:
    """A sampler's indices in batches of `batch_size`; the last is shorter unless `drop_last`."""

    def __init__(self, sampler: DistributedSampler, batch_size: int, drop_last: bool = False) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self._next_batch = 0

    def num_batches(self) -> int:
        """Batches per epoch on this rank; the same on every rank."""
        short = 0 if self.drop_last else self.batch_size - 1
        return (self.sampler.local_size() + short) // self.batch_size

    def has_next(self) -> bool:
        """Whether this epoch has batches left."""
        return self._next_batch < self.num_batches()

    def next(self) -> list[int]:
        """Indices of the next batch. Raises: IndexError after the last; check `has_next()`, or `reset`."""
        start = range(self.num_batches())[self._next_batch] * self.batch_size
        self._next_batch += 1
        return self.sampler.get_indices(start, start + self.batch_size).tolist()

    def reset(self, epoch: int | None = None) -> None:
        """Back to the first batch: of `epoch`, which is set on the sampler, or of the same epoch again."""
        if epoch is not None:
            self.sampler.set_epoch(epoch)
        self._next_batch = 0

    def __len__(self) -> int:
        return self.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        """The whole epoch from its first batch."""
        self.reset()
        while self.has_next():
            yield self.next()


_BLOCK = 1 << 16  # indices computed at once by a pass: large enough for numpy, small in memory


class Loaders(NamedTuple):
    """Call `train_sampler.set_epoch(epoch)` (or `train.set_epoch(epoch)`) at the start of each epoch."""

    train: DataLoader
    val: DataLoader | None
    test: DataLoader | None
    train_sampler: DistributedSampler


def create_dataloaders_distributed(
    train: Any,
    val: Any = None,
    test: Any = None,
    *,
    batch_size: int = 32,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 42,
    drop_last: bool = True,
    num_workers: int = 0,
    prefetch: int = 2,
) -> Loaders:
    """This process's loaders: its share of `train`, shuffled; its share of `val` and `test`, in order.

    Training shares are equal on all ranks (`drop_last` leaves out the tail, else it is padded), so that no
    rank waits for another. Evaluation shares hold every sample exactly once and differ by at most one:
    sums over ranks of (loss sum, count) are then those of one process.
    """
    data = as_dataset(train, num_workers=num_workers)
    sampler = DistributedSampler(data, num_replicas, rank, shuffle=True, seed=seed, drop_last=drop_last)

    def share(part: Any) -> DataLoader | None:
        if part is None:
            return None
        whole = as_dataset(part, num_workers=num_workers)
        mine = range(sampler.rank, len(whole), sampler.num_replicas)
        return DataLoader(whole, batch_size, mine, prefetch=prefetch)

    loader = DataLoader(data, batch_size, sampler, drop_last=drop_last, prefetch=prefetch)
    return Loaders(loader, share(val), share(test), sampler)
