"""Converts the data that `fit` accepts into one form."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.trees import PyTree
from cyxjax.data.loader import DataLoader
from cyxjax.data.order import Order
from cyxjax.data.sources import Dataset, Subset, as_dataset, has_items
from cyxjax.data.streams import Once, RowBatches, as_rows
from cyxjax.distributed.sampler import DistributedSampler
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.feeding.argument_pairs import as_pair, paired, refuse_unclear
from cyxjax.train.feeding.loader_reader import EvalLoader, LoaderReader
from cyxjax.train.feeding.placing import Keying, unkeyed
from cyxjax.train.settings import batch_shape

EVAL_ROWS = 256  # rows per batch of a stream: of each process in evaluation, of all in `predict`


def is_loader(data: Any) -> bool:
    """Whether `data` gives batches when iterated, and no samples by index."""
    return isinstance(data, Iterable) and not has_items(data)


def refuse_iterator(data: Any, otherwise: str = "") -> None:
    """Raises: DataError for a generator: it can be read only once, and each epoch reads its loader again."""
    if isinstance(data, Iterator):
        raise DataError(
            f"{type(data).__name__} can be read only once; expected a loader that can be read again in "
            f"each epoch. HINT: pass an object whose __iter__ makes batches{otherwise}."
        )


def _batched(data: Any, config: DistributedTrainingConfig, local_replicas: int, num_replicas: int) -> Any:
    """A stream of single samples as a loader of batches; loaders unchanged."""
    rows = as_rows(data)
    if rows is None:
        return data
    each = batch_shape(config, num_replicas).batch_size
    return RowBatches(rows, each * local_replicas, *_place(), config.drop_last)


def is_shared(data: Any) -> bool:
    """Whether all ranks read one stream, of which each takes its share."""
    return isinstance(data, RowBatches) and data.rows.shared


def order_of(loader: Any, local_replicas: int) -> tuple[int, bool] | None:
    """(seed, shuffle) to read a training loader's dataset with; None if its own batches are read instead."""
    if type(loader) is not DataLoader or loader.batch_size % local_replicas:
        return None
    if loader.sampler is not None and not _is_our_share(loader.sampler):
        return None
    # A sampler's own drop_last makes ranks equally long. They already are, so nothing is dropped.
    ordering: Any = loader if loader.sampler is None else loader.sampler
    return ordering.seed, ordering.shuffle


def whole_dataset(loader: Any) -> Dataset | None:
    """The samples of an evaluation loader that all ranks together read once; None if that is not known."""
    if type(loader) is not DataLoader or loader.drop_last:
        return None
    sampler, (rank, world_size) = loader.sampler, _place()
    share = range(rank, len(loader.dataset), world_size)
    known = sampler is None or (isinstance(sampler, range) and sampler == share)
    return loader.dataset if known or _is_our_share(sampler) else None


def stated_batch_size(loader: Any) -> int | None:
    """Samples per batch of this process; None if the loader does not state it."""
    found = getattr(loader, "batch_size", None)
    return found if isinstance(found, int) and found >= 1 else None


def with_batch_size(
    config: DistributedTrainingConfig, loader: Any, local_replicas: int, num_replicas: int
) -> DistributedTrainingConfig:
    """`config` with the batch size of a loader that has one: it counts samples per process, ours per replica.

    Raises: ConfigError if `global_batch_size` differs, or if the learning rate is to be scaled by a batch
        whose size is not known.
    """
    per_process = stated_batch_size(loader)
    if per_process is None:
        if config.lr_scaling != "none" and config.global_batch_size is None:
            raise ConfigError(
                f"lr_scaling={config.lr_scaling!r} scales by the batch, and this {type(loader).__name__} has "
                "no batch_size. HINT: give it one, or set global_batch_size, the number of samples of a step."
            )
        return config
    batch_size = -(-per_process // local_replicas)
    total = batch_size * num_replicas * config.gradient_accumulation_steps
    if config.global_batch_size not in (None, total):
        raise ConfigError(
            f"global_batch_size={config.global_batch_size}, but the loader's batch_size={per_process} makes "
            f"{total} per step over all replicas. HINT: leave global_batch_size out: the loader decides."
        )
    return config.model_copy(update={"batch_size": batch_size, "global_batch_size": None})


def _is_our_share(sampler: Any) -> bool:
    return type(sampler) is DistributedSampler and (sampler.rank, sampler.num_replicas) == _place()


def _place() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a group."""
    return jax.process_index(), jax.process_count()


class FitData(NamedTuple):
    """Training and validation data, each a `Dataset` (with an index) or a loader of batches."""

    train: Any
    val: Any
    indexed: bool  # whether `train` is a Dataset
    order: tuple[int, bool] | None = None  # (seed, shuffle) of a loader; None: the configuration's
    reader: LoaderReader | None = None  # of a loader that is trained on
    first: tuple[PyTree, PyTree] | None = None  # (inputs, targets) that a loader gave first
    keying: Keying = unkeyed  # assigns the random keys of training samples


def parse(
    args: tuple[Any, ...],
    config: DistributedTrainingConfig,
    local_replicas: int = 1,
    num_replicas: int = 1,
) -> tuple[FitData, DistributedTrainingConfig]:
    """The data and configuration of `fit(X, y, config)`, `fit(X, y, X_val, y_val, config)`,
    `fit(dataset, config)` or `fit(loader, val_loader, config)`.

    Raises: ConfigError for another form, DataError for data that cannot be read.
    """
    given = list(args)
    while given and given[-1] is None:
        given.pop()
    if len(given) == 4:
        return FitData(as_dataset(paired(*given[:2])), _validation(paired(*given[2:])), True), config
    pair = as_pair(*given) if len(given) == 2 else None
    if pair is None and len(given) == 2:
        refuse_unclear(*given)
    if pair is not None:
        return _split(as_dataset(pair), None, config), config
    if len(given) in (1, 2):
        train = given[0]
        val = _validation(given[1], config.num_workers) if len(given) == 2 else None
        # before an index is looked up: a torch stream has one, which raises
        train = _batched(train, config, local_replicas, num_replicas)
        if is_loader(train):
            if config.steps_per_epoch and isinstance(train, Iterator):
                train = Once(train)
            refuse_iterator(train, ", or set steps_per_epoch, which reads on without a restart")
            if not isinstance(train, RowBatches):  # whose batches are those of the configuration
                config = with_batch_size(config, train, local_replicas, num_replicas)
            return _from_loader(train, val, config, local_replicas)
        return _split(as_dataset(train, num_workers=config.num_workers), val, config), config
    raise ConfigError(
        f"fit got {len(given)} pieces of data; expected (X, y), (X, y, X_val, y_val), "
        "(dataset[, val_dataset]) or (loader[, val_loader]). HINT: fit(X_train, y_train, config)."
    )


def unsplit(data: Dataset | EvalLoader) -> FitData:
    """The result of `for_evaluation` alone; a loader comes with its first batch. Raises: DataError."""
    if isinstance(data, EvalLoader):
        return FitData(data, None, False, first=data.first)
    return FitData(data, None, True)


def one_sample(data: FitData) -> tuple[PyTree, PyTree]:
    """One sample's inputs and targets, shapes (1, ...), to learn shapes from."""
    if data.first is not None:
        return jax.tree.map(lambda a: a[:1], data.first)
    return data.train.take(np.zeros(1, np.int64))


def rows_of_first_step(data: FitData) -> int | None:
    """Samples of this process in the first step of a loader without a batch size; None for other data."""
    if data.reader is None or stated_batch_size(data.train) is not None:
        return None
    return data.reader.first.total


def _from_loader(
    train: Any, val: Dataset | EvalLoader | None, config: DistributedTrainingConfig, local_replicas: int
) -> tuple[FitData, DistributedTrainingConfig]:
    """One of our own loaders as its dataset; for other loaders, their batches.

    Raises: ConfigError for one of our own from which no validation data can be held out.
    """
    order = None if config.steps_per_epoch else order_of(train, local_replicas)
    if order is None:
        if config.validation_split and val is None and isinstance(train, DataLoader):
            raise ConfigError(
                f"validation_split={config.validation_split} cannot hold out samples of a DataLoader with "
                f"batch_size={train.batch_size} on {local_replicas} devices, with a sampler of your own, or "
                "with steps_per_epoch. HINT: pass validation data.",
                key="validation_split",
            )
        return FitData(train, val, False), config
    config = config.model_copy(update={"drop_last": config.drop_last or train.drop_last})
    return _split(train.dataset, val, config)._replace(order=order), config


def for_evaluation(val: Any, num_workers: int = 0) -> Dataset | EvalLoader:
    """A Dataset, or a loader that gives no samples by index."""
    rows = as_rows(val)
    if rows is not None:
        return EvalLoader(RowBatches(rows, EVAL_ROWS, *_place()))
    if not is_loader(val):
        return as_dataset(val, num_workers=num_workers)
    refuse_iterator(val)
    whole = whole_dataset(val)
    return EvalLoader(val) if whole is None else whole


def _validation(val: Any, num_workers: int = 0) -> Dataset | EvalLoader:
    """`for_evaluation` of the validation data of a fit. Raises: DataError that says so."""
    try:
        return for_evaluation(val, num_workers)
    except DataError as error:
        raise DataError(f"validation data: {error}") from error


def _split(dataset: Dataset, val: Dataset | EvalLoader | None, config: DistributedTrainingConfig) -> FitData:
    """`dataset` and `val`; if there is none, `validation_split` of the samples is held out, drawn once from
    the seed: the same on every rank."""
    if val is not None or not config.validation_split:
        return FitData(dataset, val, True)
    count = round(len(dataset) * config.validation_split)
    if not 0 < count < len(dataset):
        raise DataError(
            f"validation_split={config.validation_split} of {len(dataset)} samples leaves "
            f"{len(dataset) - count} to train on and {count} to validate on. "
            "HINT: give more data or a different split."
        )
    order = Order(len(dataset), config.seed, epoch=2**31)[:]  # an order no training epoch has
    train, held_out = Subset(dataset, np.sort(order[count:])), Subset(dataset, np.sort(order[:count]))
    return FitData(train, held_out, True)
