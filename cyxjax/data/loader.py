"""A data loader with torch's interface: batches of this process's samples as numpy arrays, read ahead."""

import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from queue import Empty, Queue
from typing import Any, TypeVar

import numpy as np

from cyxjax.data.order import Order
from cyxjax.data.sources import Dataset, as_dataset, is_array
from cyxjax.errors import ConfigError, DataError

T = TypeVar("T")
_END = object()
_STUCK_S = 5.0  # a source that has not returned by then is abandoned: its thread is a daemon


class DataLoader:
    """Iterates (inputs, targets) in batches of at most `batch_size`; `len()` is the number of batches. For
    one array, or a list of arrays, it yields only the inputs.

    With a `DistributedSampler` each process gets its own share, as in torch. Without one every process gets
    all samples, shuffled by (seed, epoch) if `shuffle`: the epoch increases with each pass, and `set_epoch`
    sets it (for example to resume). A sampler has a length and yields the indices of this process for one
    pass: ours, torch's, a range or a list.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        sampler: Any = None,
        shuffle: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        drop_last: bool = False,
        pin_memory: bool = False,
        seed: int = 0,
    ) -> None:
        """`dataset`: anything that `as_dataset` takes. `num_workers`: threads that read single items.
        `prefetch`: batches read ahead by one more thread (0: none). `pin_memory` is accepted for
        compatibility with torch and has no effect: JAX itself stages host arrays for the device.
        """
        self.dataset: Dataset = as_dataset(dataset, num_workers=num_workers)
        self._inputs_alone = is_array(dataset[0] if isinstance(dataset, list) else dataset)
        _check_sampler(sampler, shuffle, len(self.dataset))
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.sampler, self.pin_memory, self.seed = sampler, pin_memory, seed
        self.prefetch = prefetch
        self._next_epoch = 0

    def __len__(self) -> int:
        size = len(self.dataset) if self.sampler is None else len(self.sampler)
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """One pass. Leaving it early, by `break` or an error, also ends the reading thread."""
        order = Order(len(self.dataset), self.seed, self._next_epoch, self.shuffle)
        self._next_epoch += 1
        indices = iter(order if self.sampler is None else self.sampler)
        return prefetch(self._batches(indices), self.prefetch)

    def set_epoch(self, epoch: int) -> None:
        """Gives the next pass the order of `epoch`; also calls `set_epoch` of the sampler, if it has one."""
        self._next_epoch = epoch
        set_epoch_of(self.sampler, epoch)

    def _batches(self, indices: Iterator[int]) -> Iterator[Any]:
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                found = self.dataset.take(np.array(batch, np.int64))
                yield found[0] if self._inputs_alone else found


def set_epoch_of(loader: Any, epoch: int) -> None:
    """Calls `set_epoch` of a loader, or else of its sampler, if one of them has it."""
    target = part_with_set_epoch(loader)
    if target is not None:
        target.set_epoch(epoch)


def part_with_set_epoch(loader: Any) -> Any:
    """The loader, or else its sampler, if it has `set_epoch`; else None."""
    parts = loader, getattr(loader, "sampler", None)
    return next((part for part in parts if hasattr(part, "set_epoch")), None)


def _check_sampler(sampler: Any, shuffle: bool, num_samples: int) -> None:
    if sampler is not None and shuffle:
        raise ConfigError(
            "DataLoader(sampler=..., shuffle=True): the sampler decides the order. "
            "HINT: leave shuffle out and pass shuffle=True to the sampler."
        )
    total = getattr(sampler, "total_size", None)
    if callable(total) and total() != num_samples:
        raise DataError(
            f"a sampler over {total()} samples for a dataset of {num_samples}. "
            "HINT: build the sampler with len(dataset)."
        )


def prefetch(source: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Items of `source` in order, read up to `depth` ahead by a background thread; depth 0 reads inline.

    It is a generator: call `close()` if the loop may end early, which also ends thread and source. An error
    of the source is raised after the items before it, with its original traceback.
    """
    if depth == 0:
        yield from source
        return
    ready: Queue[tuple[Any, BaseException | None]] = Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_read, args=(source, ready, stopped), name="cyxjax-prefetch", daemon=True
    )
    thread.start()
    is_exiting = sys.is_finalizing
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        if not is_exiting():  # then threads stand still, and names of modules may be gone
            stopped.set()
            with suppress(Empty):  # the thread may wait for space in the queue
                while True:
                    ready.get_nowait()
            thread.join(_STUCK_S)


def _read(
    source: Iterable[Any], ready: Queue[tuple[Any, BaseException | None]], stopped: threading.Event
) -> None:
    """Body of the thread. Everything raised is passed on, including SystemExit."""
    error: BaseException | None = None
    try:
        iterator = iter(source)
        for item in iterator:
            ready.put((item, None))
            del item  # frees the batch while the thread reads the next one
            if stopped.is_set():
                break
        if hasattr(iterator, "close"):  # a generator's `finally` blocks run now
            iterator.close()
    except BaseException as raised:
        error = raised
    if not stopped.is_set():
        ready.put((_END, error))
