"""Reads a loader: passes over it, and the steps of an epoch from any position on."""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeVar

import jax
import numpy as np

from cyxjax.data.batches import HostBatch
from cyxjax.data.loader import part_with_set_epoch, prefetch, set_epoch_of
from cyxjax.data.sources import as_batches
from cyxjax.data.streams import Reader, end_place
from cyxjax.errors import DataError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.feeding.loader_steps import LoaderBatch, agreed, rows_of, steps
from cyxjax.train.hooks.hook import Position

T = TypeVar("T")


class BatchSize:
    """The number of samples of the first batch; batches with fewer are left out if `drop_last`."""

    def __init__(self, drop_last: bool):
        self.first, self._drop_last = 0, drop_last

    @property
    def least(self) -> int:
        """Samples that a batch needs to be used."""
        return self.first if self._drop_last else 0

    def is_enough(self, batch: LoaderBatch) -> bool:
        """Whether `batch` is used; the first one always is."""
        self.first = self.first or rows_of(batch.pair)
        return rows_of(batch.pair) >= self.least


class LoaderReader:
    """The steps of a loader, from any position on.

    An epoch is one pass over the loader, or `steps_per_epoch` steps of repeated passes, read on across
    epochs. Batches are padded to the size of the first one. A rank that has run out before it read anything
    repeats the first step with weight 0. drop_last: leaves out batches with fewer samples than the first one,
    and steps for which a rank has too few batches.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        local: int,
        *,
        accumulation: int,
        depth: int,
        steps_per_epoch: int | None,
        drop_last: bool = False,
    ):
        self._loader, self._local, self._size = loader, local, BatchSize(drop_last)
        self._accumulation, self._depth, self._steps_per_epoch = accumulation, depth, steps_per_epoch
        self._first: HostBatch | None = None
        self._is_begun = False  # whether the pass that gave `_first` has given nothing else
        self._ahead: Generator[HostBatch, None, None] | None = None
        self._batches: Iterator[tuple[HostBatch, bool]] = iter(())
        self._at: tuple[int, int] | None = None  # (epoch, steps of it) given so far, for an endless stream
        self._next: int | None = None  # the epoch of the next pass, if the last one was read to its end
        self._end: list[Any] = []  # the loader's own position after that pass; empty during a pass

    @property
    def first(self) -> HostBatch:
        """The first step of this process. Reading begins here, and `epoch` continues it.

        Raises: DataError for an empty loader.
        """
        if self._first is None:
            self._first = first_of(self._read(Position()))
            self._is_begun = not restarts(self._loader)
        return self._first

    def epoch(self, position: Position) -> Iterator[tuple[HostBatch, bool]]:
        """(batch, whether it is the last) of the rest of an epoch, each with its `stop`.

        A loader whose steps have changed cannot be read from the middle of one: reading continues with the
        first step that holds a sample after the position, with a warning.
        """
        done, seen = position.step_in_epoch, position.samples
        if done == self._steps_per_epoch:  # the state that a rollback went back to ended the epoch
            return
        if self._at != (position.epoch, done):
            seen = self._open(position)
        for host, is_last in self._batches:
            before, seen = seen, seen + host.total
            if seen <= position.samples:
                continue
            if before < position.samples and jax.process_index() == 0:
                warn_on_stderr(
                    f"WARNING: no step of the loader begins at sample {position.samples} of epoch "
                    f"{position.epoch + 1}, where this run continues. It reads from "
                    f"{position.samples - before} samples earlier; they may be used twice. HINT: resume with "
                    "the same batch size, gradient_accumulation_steps and number of processes, or give fit a "
                    "dataset."
                )
            done += 1
            ends = done == self._steps_per_epoch
            if self._steps_per_epoch:
                self._at = (position.epoch + 1, 0) if ends else (position.epoch, done)
            place = next(iter(self._end), None) if is_last else host.place
            yield host._replace(stop=seen, places=before + host.places, place=place), is_last or ends
            if ends:
                return
        self.close()
        self._next = position.epoch + 1
        if not done:
            least = self._size.least
            short = f" (drop_last leaves out batches of fewer than {least} samples)" if least else ""
            raise DataError(
                f"the loader gave no step in epoch {position.epoch + 1}{short}. HINT: let each pass over it "
                "start over."
            )

    def close(self) -> None:
        """Ends the reading thread; the next epoch starts the loader again and skips what was given."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._at, self._is_begun = None, None, False

    def _open(self, position: Position) -> int:
        """Begins to read at the place of `position`; if that is not known, at the beginning.

        Returns the samples of the epoch that were read before; below 0, those of earlier epochs that follow.
        """
        if self._steps_per_epoch is None:
            followed: Iterator[Any] = pairwise(chain(self._agreed(position), [None]))
            self._batches = ((host, after is None) for host, after in followed)
        else:
            self._batches = zip(self._agreed(position), itertools.repeat(False))
        if position.place is not None:
            return position.samples
        if self._steps_per_epoch is None:
            return 0
        for _ in range(0 if position.earlier else position.epoch * self._steps_per_epoch):
            next(self._batches)  # as a checkpoint of 0.2.0 is read, which has no `earlier`
        return -position.earlier

    def _agreed(self, position: Position) -> Iterator[HostBatch]:
        """The steps of all ranks from `position` on."""
        padding, least = self.first._replace(place=position.place), self._size.least * self._accumulation
        if self._steps_per_epoch and self.first.total < least:  # the next pass gives no more, without end
            raise DataError(
                f"drop_last leaves out steps of fewer than {least} samples, and a pass over the loader gives "
                f"{self.first.total}. HINT: lower gradient_accumulation_steps={self._accumulation}."
            )
        # A pass of a loader that has `set_epoch` belongs to epoch 0.
        is_any = self._steps_per_epoch or part_with_set_epoch(self._loader) is None
        if self._is_begun and position.place is None and (is_any or not position.epoch):
            self._is_begun = False
            return agreed(chain([self.first], self._ahead or ()), padding, least)
        return agreed(self._read(position), padding, least)

    def _read(self, position: Position) -> Iterator[HostBatch]:
        """The steps of this process. Nothing but the reading thread uses what the loader opens."""
        self.close()
        begins = not position.step_in_epoch
        # A loader that this reader has just read to its end is at the place: it loads no state.
        place = None if begins and self._next == position.epoch else position.place
        self._next, self._end = None, []
        if self._steps_per_epoch is None:
            set_epoch_of(self._loader, position.epoch)
            read = next_pass if begins else one_pass
            batches = noting_the_end(read(self._loader, place, self._size.is_enough), self._loader, self._end)
        else:  # passes are repeated without end
            batches = passes(self._loader, position.place, self._size.is_enough)
        each = -(-self._size.first // self._local)
        self._ahead = prefetch(steps(batches, self._local, self._accumulation, each), self._depth)
        return self._ahead


class EvalLoader:
    """A loader to evaluate on, or to predict for; iterated, it gives the `LoaderBatch`es of a pass.

    The first pass continues the one that gave `first`.
    """

    def __init__(self, loader: Iterable[Any]):
        self._loader = loader
        self._begun: Iterator[LoaderBatch] | None = None

    @cached_property
    def first(self) -> tuple[Any, Any]:
        """The inputs and targets of the first batch. Raises: DataError for an empty loader."""
        batches = one_pass(self._loader)
        batch = first_of(batches)
        batch = batch._replace(pair=jax.tree.map(np.array, batch.pair))  # a loader may reuse its arrays
        if not restarts(self._loader):
            self._begun = chain([batch], batches)
        return batch.pair

    def __iter__(self) -> Iterator[LoaderBatch]:
        begun, self._begun = self._begun, None
        return begun or one_pass(self._loader)


def restarts(loader: Any) -> bool:
    """Whether a pass over `loader` ends an open one: torch's with persistent workers has one iterator."""
    return bool(getattr(loader, "persistent_workers", False))


def one_pass(
    loader: Iterable[Any], place: Any = None, is_used: Callable[[LoaderBatch], bool] = lambda batch: True
) -> Iterator[LoaderBatch]:
    """The batches of a pass over `loader`, from `place` on, that are used.

    Samples of ranks with their own loaders are numbered in turn.
    """
    reader, rank, ranks = Reader(loader, place), jax.process_index(), jax.process_count()
    for pair in as_batches(reader.raw):
        own = reader.own()
        own = range(rank, rows_of(pair) * ranks, ranks) if own is None else own
        batch = LoaderBatch(pair, own, reader.place())
        if is_used(batch):
            yield batch


def next_pass(
    loader: Iterable[Any], place: Any = None, is_used: Callable[[LoaderBatch], bool] = lambda batch: True
) -> Iterator[LoaderBatch]:
    """`one_pass`, where `place` may be the end of the pass before."""
    is_over = place is not None
    for batch in one_pass(loader, place, is_used):
        is_over = False
        yield batch
    if is_over:
        yield from one_pass(loader, None, is_used)


def noting_the_end(
    batches: Iterator[LoaderBatch], loader: Iterable[Any], found: list[Any]
) -> Iterator[LoaderBatch]:
    """`batches` of a pass; adds the position of `loader` after them to `found`.

    The thread that reads must not hold the reader: it ends when the reader is gone.
    """
    yield from batches
    found.append(end_place(loader))


def passes(
    loader: Iterable[Any], place: Any = None, is_used: Callable[[LoaderBatch], bool] = lambda batch: True
) -> Iterator[LoaderBatch]:
    """Repeated `one_pass`; `set_epoch` gets the number of each. A place is (number of the pass, its place).

    Raises: DataError if a pass gives nothing.
    """
    start, within = place or (0, None)
    for number in itertools.count(start):
        set_epoch_of(loader, number)
        is_empty = within is None
        for batch in one_pass(loader, within, is_used):
            is_empty = False
            at = None if batch.place is None else [number, batch.place]
            yield batch._replace(place=at, number=number)
        if is_empty:
            raise DataError(
                f"the loader gave nothing in pass {number}; steps_per_epoch needs repeated passes. HINT: let "
                "its __iter__ start from the beginning, or set max_steps to the steps it has."
            )
        within = None


def first_of(batches: Iterator[T]) -> T:
    """The first of a loader's batches. Raises: DataError if there is none."""
    for batch in batches:
        return batch
    raise DataError("the loader is empty. HINT: check the dataset and drop_last.")
