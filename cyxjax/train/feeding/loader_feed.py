"""Batches of loaders: an epoch is a pass over the loader, or a number of steps of an endless stream."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from cyxjax.core.step import Batch
from cyxjax.data.batches import HostBatch
from cyxjax.data.loader import tell_epoch
from cyxjax.data.prefetch import Inline, Prefetch, prefetch
from cyxjax.data.streams import Once
from cyxjax.errors import DataError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.feeding.loader_batches import agreed, endless, stream
from cyxjax.train.feeding.placing import Keying, RowPlacer, places_of_loader, unkeyed
from cyxjax.train.feeding.stream_positions import StreamPosition, StreamPositions
from cyxjax.train.hooks.hook import Fed, Feed, Position

Ask = Callable[[], tuple[float, bool]]
Warn = Callable[[str], None]


def loader_feed(
    placer: RowPlacer,
    train: Iterable[Any],
    val_batches: Callable[[], Iterable[Batch]] | None,
    *,
    accumulation: int,
    depth: int,
    steps_per_epoch: int | None = None,
    positions: StreamPositions | None = None,
    size: int = 0,
    keying: Keying = unkeyed,
) -> Feed:
    """Batches of loaders, one loader a process, as under torch: each yields this process's samples.

    Ranks may run out of data at different times: they agree on each step's number of samples, and a rank
    without any takes part with weight 0. With `steps_per_epoch` none runs out: each reads its loader again.
    """
    warn, positions = warner(), positions or StreamPositions()
    local = len(placer.shares)
    here = jax.process_index(), jax.process_count()

    def put(host: HostBatch, epoch: int, ask: Ask) -> Batch:
        return placer.put(keying(host, epoch, places_of_loader(host, *here)), ask())

    if steps_per_epoch is not None:
        reading = EndlessLoader(train, local, accumulation, depth, steps_per_epoch, size, positions, warn)

        def epoch_of_steps(position: Position, ask: Ask) -> Iterator[Fed]:
            for host, is_last in reading.epoch(position):
                yield Fed(put(host, position.epoch, ask), host.stop, is_last)

        return Feed(epoch_of_steps, steps_per_epoch, val_batches, reading.close)

    def train_batches(position: Position, ask: Ask) -> Iterator[Fed]:
        tell_epoch(train, position.epoch)
        known = positions.before(position)
        place = None if known is None else known.place
        with prefetch(stream(local, train, accumulation, place, size), depth) as batches:
            empty = True
            for step, host in _passed_over(agreed(batches), position, warn, known):
                empty = False
                positions.note(position.epoch, step + 1, host.stop, host.place)
                yield Fed(put(host, position.epoch, ask), host.stop)
        if empty and not position.step_in_epoch:
            raise DataError(
                f"the loader gave no batch in epoch {position.epoch}; it gave some before. HINT: let its "
                "__iter__ start from the beginning."
            )

    return Feed(train_batches, None, val_batches)


class EndlessLoader:
    """A loader read across epochs: epoch e has its steps from e * steps_per_epoch on."""

    def __init__(
        self,
        loader: Any,
        local: int,
        accumulation: int,
        depth: int,
        steps_per_epoch: int,
        size: int,
        positions: StreamPositions,
        warn: Warn,
    ):
        self._loader, self._local, self._accumulation, self._depth = loader, local, accumulation, depth
        self._steps_per_epoch, self._positions, self._warn = steps_per_epoch, positions, warn
        self._size = size
        self._ahead: Prefetch[HostBatch] | Inline[HostBatch] | None = None
        self._batches: Iterator[HostBatch] = iter(())
        self._given = 0  # steps, since the loader was first begun

    def epoch(self, position: Position) -> Iterator[tuple[HostBatch, bool]]:
        """(batch, whether it is the epoch's last) of the rest of an epoch, each with its `stop`."""
        samples = self._go_to(position)
        for step in range(position.step_in_epoch, self._steps_per_epoch):
            host = self._next()
            samples += host.total
            is_last = step + 1 == self._steps_per_epoch
            if is_last:  # where the next epoch begins
                self._positions.note(position.epoch + 1, 0, 0, host.place)
            self._positions.note(position.epoch, step + 1, samples, host.place)
            yield host._replace(stop=samples), is_last

    def close(self) -> None:
        """Ends the reading thread; the next epoch starts the loader again and skips what was given."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _next(self) -> HostBatch:
        host = next(self._batches)
        self._given += 1
        return host

    def _go_to(self, position: Position) -> int:
        """Samples of the epoch before `position`, having passed over what was consumed."""
        first = position.epoch * self._steps_per_epoch
        wanted = first + position.step_in_epoch
        samples = 0
        if self._ahead is None or self._given > wanted:
            known = self._positions.before(position)
            samples = 0 if known is None else known.samples
            self._begin(0 if known is None else first + known.step, None if known is None else known.place)
        if self._given == wanted:
            return position.samples
        while self._given < wanted:
            host = self._next()
            samples += host.total if self._given > first else 0
        if samples != position.samples:
            self._warn(
                f"WARNING: the {position.step_in_epoch} steps before, of epoch {position.epoch}, had "
                f"{position.samples} samples; as many of the loader have {samples} now: some may be used "
                "twice or never. HINT: resume with the same batch size and number of processes."
            )
        return position.samples

    def _begin(self, given: int, place: Any) -> None:
        if self._given and isinstance(getattr(self._loader, "loader", self._loader), Once):
            raise DataError(
                f"the {type(self._loader).__name__} was read {self._given} steps on and cannot be read again "
                "from before. HINT: pass an object whose __iter__ starts from the beginning."
            )
        self.close()
        self._ahead = prefetch(
            endless(self._local, self._loader, self._accumulation, place, self._size), self._depth
        )
        self._batches, self._given = agreed(self._ahead), given


def warner() -> Warn:
    """Prints a line, on rank 0."""
    return warn_on_stderr if jax.process_index() == 0 else lambda text: None


def _passed_over(
    batches: Iterable[HostBatch], position: Position, warn: Warn, known: StreamPosition | None
) -> Iterator[tuple[int, HostBatch]]:
    """(its number in the epoch, batch) after those that were consumed, each with its `stop`.

    known: where the batches begin; None: with the epoch.

    A loader of other batches than before cannot be read from the middle of one: it goes on with the first
    batch that holds a sample after the place, and says so.
    """
    seen = 0 if known is None else known.samples
    for step, host in enumerate(batches, 0 if known is None else known.step):
        before, seen = seen, seen + host.total
        if seen <= position.samples:
            continue
        if before <= position.samples and position.samples and (before, step) != position[2:]:
            again = position.samples - before
            warn(
                f"WARNING: {position.samples} samples of epoch {position.epoch} were consumed in "
                f"{position.step_in_epoch} steps; the loader's batches are of another size now. Going on "
                f"after its first {step} steps, {before} samples: {again} of them may be used twice. "
                "HINT: resume with the same batch size and number of processes, or give fit a dataset."
            )
        yield step, host._replace(stop=seen)
