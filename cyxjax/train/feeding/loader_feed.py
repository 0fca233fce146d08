"""A loader's batches as steps: split over this process's replicas, synchronized with the other ranks.

One loader per process, as in torch: each yields this process's samples. Ranks may run out of data at
different times: they agree on each step's number of samples, and a rank without any takes part with weight 0.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyxjax.core.draws import place_in_step
from cyxjax.core.mesh import refuse_wrapping
from cyxjax.data.batches import HostBatch
from cyxjax.data.labels import Check, unchecked
from cyxjax.data.loader import prefetch, tell_epoch
from cyxjax.data.sources import as_batches
from cyxjax.data.streams import Reader
from cyxjax.errors import DataError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.hooks.hook import Position

Ask = Callable[[], tuple[float, bool]]


class LoaderBatch(NamedTuple):
    """A batch of a loader on this process."""

    pair: tuple[Any, Any]  # inputs and targets; further rows than `own` has places only fill up the batch
    own: range  # the places of its samples among those of all ranks; `own.stop` is their number
    place: Any  # the loader's own position after it
    number: int = 0  # of its pass over the loader


class LoaderReader:
    """The steps of a loader, from any position on.

    An epoch is one pass over the loader, or `steps_per_epoch` steps of repeated passes, read on across
    epochs. first: the batches of this process's first step. Batches are padded to the size of the first one;
    (): to that of the first batch read. A rank that has run out before it read anything repeats them with
    weight 0. drop_last: leaves out batches with fewer samples than the first one, and steps for which a
    rank has too few batches. check: is called with the targets of every batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        local: int,
        *,
        accumulation: int,
        depth: int,
        steps_per_epoch: int | None,
        first: Sequence[tuple[Any, Any]] = (),
        drop_last: bool = False,
        check: Check = unchecked,
    ):
        self._loader, self._local, self._check = loader, local, check
        self._size = -(-rows_of(first[0]) // local) if first else 0
        self._least = rows_of(first[0]) if first and drop_last else 0
        self._padding: HostBatch | None = None
        if first and jax.process_count() > 1:
            empty = [LoaderBatch(jax.tree.map(lambda a: a[:1], pair), range(0), None) for pair in first]
            self._padding = _deal(empty, local, accumulation, self._size)
        self._accumulation, self._depth, self._steps_per_epoch = accumulation, depth, steps_per_epoch
        self._ahead: Generator[HostBatch, None, None] | None = None
        self._batches: Iterator[tuple[HostBatch, bool]] = iter(())
        self._at: tuple[int, int] | None = None  # (epoch, steps of it) given so far, for an endless stream

    def epoch(self, position: Position) -> Iterator[tuple[HostBatch, bool]]:
        """(batch, whether it is the last) of the rest of an epoch, each with its `stop`.

        A loader whose batches have changed cannot be read from the middle of one: reading continues with the
        first batch that holds a sample after the position, with a warning.
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
                    f"WARNING: {position.samples} samples of epoch {position.epoch + 1} were consumed, and "
                    f"the loader's batches now have a different size. Continuing after its first {before} "
                    f"samples: {position.samples - before} samples may be used twice. HINT: resume with the "
                    "same batch size and number of processes, or give fit a dataset."
                )
            done += 1
            ends = done == self._steps_per_epoch
            if self._steps_per_epoch:
                self._at = (position.epoch + 1, 0) if ends else (position.epoch, done)
            yield host._replace(stop=seen, places=before + host.places), is_last or ends
            if ends:
                return
        self.close()
        if not done:
            raise DataError(
                f"the loader gave no step in epoch {position.epoch + 1}{_without(self._least)}. HINT: let "
                "each pass over it start over."
            )

    def close(self) -> None:
        """Ends the reading thread; the next epoch starts the loader again and skips what was given."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._at = None, None

    def _open(self, position: Position) -> int:
        """Begins to read at the place of `position`; if that is not known, at the beginning.

        Returns the samples of the epoch that were read before.
        """
        self.close()
        place = position.place
        if self._steps_per_epoch is None:
            tell_epoch(self._loader, position.epoch)
            read = self._steps(one_pass(self._loader, place, self._least, self._check), place)
            followed: Iterator[Any] = pairwise(chain(read, [None]))
            self._batches = ((host, after is None) for host, after in followed)
        else:  # passes are repeated without end
            batches = passes(self._loader, place, self._least, self._check)
            self._batches = zip(self._steps(batches, place), itertools.repeat(False))
        if place is not None:
            return position.samples
        for _ in range(position.epoch * (self._steps_per_epoch or 0)):
            next(self._batches)
        return 0

    def _steps(self, batches: Iterator[LoaderBatch], place: Any) -> Iterator[HostBatch]:
        """`batches`, which are read from `place` on, as the steps of all ranks."""
        self._ahead = prefetch(steps(batches, self._local, self._accumulation, self._size), self._depth)
        padding = self._padding and self._padding._replace(place=place)
        return agreed(self._ahead, padding, self._least * self._accumulation)


def one_pass(
    loader: Iterable[Any], place: Any = None, least: int = 0, check: Check = unchecked
) -> Iterator[LoaderBatch]:
    """A pass over `loader`, from `place` on, without the batches of fewer samples than `least`.

    Samples of ranks with their own loaders are numbered in turn.
    """
    reader, rank, ranks = Reader(loader, place), jax.process_index(), jax.process_count()
    for number, pair in enumerate(as_batches(reader.raw)):
        check(pair[1], f": batch {number}")
        own = reader.own()
        own = range(rank, rows_of(pair) * ranks, ranks) if own is None else own
        if rows_of(pair) >= least:
            yield LoaderBatch(pair, own, reader.place())


def passes(
    loader: Iterable[Any], place: Any = None, least: int = 0, check: Check = unchecked
) -> Iterator[LoaderBatch]:
    """Repeated `one_pass`; `set_epoch` gets the number of each. A place is (number of the pass, its place).

    Raises: DataError if a pass gives nothing.
    """
    start, within = place or (0, None)
    for number in itertools.count(start):
        tell_epoch(loader, number)
        is_empty = within is None
        for batch in one_pass(loader, within, least, check):
            is_empty = False
            at = None if batch.place is None else [number, batch.place]
            yield batch._replace(place=at, number=number)
        if is_empty:
            raise DataError(
                f"the loader gave nothing in pass {number}{_without(least)}; steps_per_epoch needs "
                "repeated passes. HINT: let its __iter__ start from the beginning, or set max_steps to the "
                "steps it has."
            )
        within = None


def _without(least: int) -> str:
    return f" (drop_last leaves out batches of fewer than {least} samples)" if least else ""


def steps(
    batches: Iterator[LoaderBatch], local: int, accumulation: int, size: int = 0
) -> Iterator[HostBatch]:
    """`accumulation` batches of a pass as a step's rows for `local` shares, padded to `size` or as the first.

    The last step of a pass may have fewer batches. `total` counts this process's samples. `places` count the
    samples of all ranks, from 0 at the step's first.
    """
    if accumulation > 1:  # a loader may fill the same arrays again for its next batch
        batches = (batch._replace(pair=jax.tree.map(np.array, batch.pair)) for batch in batches)
    for _, of_pass in groupby(batches, attrgetter("number")):
        while group := list(islice(of_pass, accumulation)):
            size = size or -(-rows_of(group[0].pair) // local)
            yield _deal(group, local, accumulation, size)


def _deal(group: list[LoaderBatch], local: int, accumulation: int, size: int) -> HostBatch:
    """Rows ordered (replica, micro-batch, slot); a short batch repeats its samples with weight 0.

    A batch larger than `size` has its own size, which does not depend on where reading began.
    """
    pairs = [batch.pair for batch in group]
    refuse_wrapping(pairs)  # here a row is still the loader's
    rows = [rows_of(pair) for pair in pairs]
    if max(rows) > size * local and jax.process_count() > 1:
        raise DataError(
            f"the loader gave a batch of {max(rows)} samples after one of at most {size * local}; with "
            "several processes, each pads its batches to the first. HINT: let the first be the largest."
        )
    size = max(size, -(-max(rows) // local))
    slots = place_in_step(np.arange(size), 0, np.arange(local)[:, None], rows=size, num_replicas=local)
    weight = np.zeros((local, accumulation, size), np.float32)
    index, places = np.zeros((2, *weight.shape), np.int64)
    row = place = 0
    for micro, own in enumerate(batch.own for batch in group):
        weight[:, micro] = slots < len(own)
        index[:, micro] = row + slots % max(len(own), 1)
        places[:, micro] = place + own.start + slots * own.step
        row, place = row + rows[micro], place + own.stop
    inputs, targets = jax.tree.map(lambda *a: np.concatenate(a)[index.reshape(-1)], *pairs)
    total, at = sum(len(batch.own) for batch in group), group[-1].place
    return HostBatch(inputs, targets, weight.reshape(-1), total, places.reshape(-1), place=at)


def agreed(
    batches: Iterable[HostBatch], padding: HostBatch | None = None, least: int = 0
) -> Iterator[HostBatch]:
    """`batches` with `total` summed over all ranks, until the last rank has run out.

    padding: the batch of a rank that has run out before its first one. least: steps with fewer samples, also
    summed over all ranks, are left out.
    """
    least = _over_ranks(least) if least else 0
    for host in batches if jax.process_count() == 1 else _then_padding(batches, padding):
        total = _over_ranks(host.total if host else 0)
        if not total:
            return
        if host is None:
            raise DataError("this rank's loader is empty, peers have data. HINT: give each rank a sample.")
        if total >= least:
            yield host._replace(total=total)


def _over_ranks(count: int) -> int:
    """`count` summed over all ranks."""
    if jax.process_count() == 1:
        return count
    return int(multihost_utils.process_allgather(np.int64(count)).sum())


def _then_padding(batches: Iterable[HostBatch], padding: HostBatch | None) -> Iterator[HostBatch | None]:
    """`batches`, then the last of them again and again, with weight 0; `padding` if there were none; None
    without either. Values that are not finite become 0, since 0 * NaN is NaN.
    """
    host = padding
    for host in batches:
        yield host
    if host is not None:
        inputs, targets = jax.tree.map(lambda a: np.where(np.isfinite(a), a, np.zeros_like(a)), host[:2])
        host = host._replace(inputs=inputs, targets=targets, weight=np.zeros_like(host.weight), total=0)
    yield from itertools.repeat(host)


def rows_of(part: tuple[Any, Any]) -> int:
    return len(jax.tree.leaves(part)[0])
