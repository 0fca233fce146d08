"""Loaders for every process of a group, in one call."""

from typing import Any, NamedTuple

from cyxjax.data.loader import DataLoader
from cyxjax.data.sources import as_dataset
from cyxjax.distributed.sampler import DistributedSampler


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
