"""Loaders of ours whose samples the trainer may fetch by itself, so that every sample counts once an epoch.

A `cx.DataLoader` over a `DistributedSampler` pads the ranks' shares to one length, as torch does, and counts
some samples twice. Its dataset, order and batch size say all there is to know, so `fit` reads those and
deals the same samples to the same ranks, padding with weight 0. Other loaders are read batch by batch.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.data.loader import DataLoader
from cyxjax.data.sources import Dataset
from cyxjax.distributed import process_group
from cyxjax.distributed.sampler import DistributedSampler
from cyxjax.errors import ConfigError, DataError


class Reading(NamedTuple):
    """A loader's dataset and the order it is read in."""

    dataset: Dataset
    seed: int
    shuffle: bool
    drop_last: bool


def is_loader(data: Any) -> bool:
    """Gives batches when iterated, rather than samples by index."""
    return isinstance(data, Iterable) and not hasattr(data, "__getitem__")


def refuse_iterator(data: Any) -> None:
    """Raises: DataError for a generator: it could be read once, and an epoch reads its loader anew."""
    if isinstance(data, Iterator):
        raise DataError(
            f"{type(data).__name__} can be read only once; expected a loader that starts anew in each epoch. "
            "HINT: pass cx.data.DataLoader(dataset, batch_size), or an object whose __iter__ makes batches."
        )


def read_exactly(loader: Any, local_replicas: int) -> Reading | None:
    """How to read a training loader sample by sample; None for one that must be asked for its batches."""
    if type(loader) is not DataLoader or loader.batch_size % local_replicas:
        return None
    sampler = loader.sampler
    if sampler is None:
        return Reading(loader.dataset, loader.seed, loader.shuffle, loader.drop_last)
    if not isinstance(sampler, DistributedSampler) or not _is_our_share(sampler):
        return None
    # A sampler's own drop_last keeps ranks equally long. They are anyway: nothing need be dropped for it.
    return Reading(loader.dataset, sampler.seed, sampler.shuffle, loader.drop_last)


def whole_dataset(loader: Any) -> Dataset | None:
    """The samples of an evaluation loader that all ranks together read once; None if that is not known."""
    if type(loader) is not DataLoader or loader.drop_last:
        return None
    sampler, (rank, world_size) = loader.sampler, _place()
    ours = isinstance(sampler, DistributedSampler) and _is_our_share(sampler)
    if sampler is None or ours or sampler == range(rank, len(loader.dataset), world_size):
        return loader.dataset
    return None


def with_batch_size(
    config: DistributedTrainingConfig, loader: Any, local_replicas: int, num_replicas: int
) -> DistributedTrainingConfig:
    """`config` with the batch size of a loader that has one: it counts samples per process, ours per replica.

    Raises: ConfigError when `global_batch_size` says something else.
    """
    per_process = getattr(loader, "batch_size", None)
    if not isinstance(per_process, int) or per_process < 1:
        return config
    batch_size = -(-per_process // local_replicas)
    total = batch_size * num_replicas * config.gradient_accumulation_steps
    if config.global_batch_size not in (None, total):
        raise ConfigError(
            f"global_batch_size={config.global_batch_size}, but the loader's batch_size={per_process} makes "
            f"{total} per step over all replicas. HINT: leave global_batch_size out, the loader decides."
        )
    return config.model_copy(update={"batch_size": batch_size, "global_batch_size": None})


def _is_our_share(sampler: DistributedSampler) -> bool:
    return (sampler.rank, sampler.num_replicas) == _place()


def _place() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a group."""
    if not process_group.is_initialized():
        return 0, 1
    return process_group.get_rank(), process_group.get_world_size()
