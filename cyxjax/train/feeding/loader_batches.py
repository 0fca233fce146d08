"""A loader's batches as steps: split over this process's replicas, in step with the other ranks."""

import itertools
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyxjax.core.draws import place_in_step
from cyxjax.core.mesh import refuse_wrapping
from cyxjax.data.batches import HostBatch
from cyxjax.data.loader import tell_epoch
from cyxjax.data.streams import Reader
from cyxjax.errors import DataError


def stream(
    local: int, loader: Iterable[Any], accumulation: int, place: Any = None, size: int = 0
) -> Iterator[HostBatch]:
    """`accumulation` loader batches as one step's rows for `local` shares; the first one says how many are
    padded to, or `size`: what is read on from a place may begin with a short one."""
    reader = Reader(loader, place)
    batches = reader.pairs()
    if accumulation > 1:  # a loader may fill the same arrays again for its next batch
        batches = (jax.tree.map(np.array, batch) for batch in batches)
    while group := list(islice(batches, accumulation)):
        size = size or -(-rows_of(group[0]) // local)
        yield _deal(group, local, accumulation, size)._replace(place=reader.place())


def endless(
    local: int, loader: Any, accumulation: int, place: Any = None, size: int = 0
) -> Iterator[HostBatch]:
    """As `stream`, pass after pass; `set_epoch` gets the number of each.

    Raises: DataError where a pass gives nothing.

    A place is (number of the pass, the loader's own).
    """
    passes = _passes(loader, place)
    while True:
        group, last = [], None
        for batch, last in islice(passes, accumulation):  # noqa: B007
            group.append(jax.tree.map(np.array, batch))
        size = size or -(-rows_of(group[0]) // local)
        yield _deal(group, local, accumulation, size)._replace(place=last)


def _passes(loader: Any, place: Any) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """(batch, place after it)."""
    given, (start, within) = 0, place or (0, None)
    for number in itertools.count(start):
        tell_epoch(loader, number)
        reader, before = Reader(loader, within), given
        for batch in reader.pairs():
            given += 1
            at = reader.place()
            yield batch, None if at is None else [number, at]
        resumed, within = within is not None, None
        if given == before and not resumed:
            raise DataError(
                f"the loader ended after {given} batches and gives no more; steps_per_epoch reads on and on. "
                "HINT: let its __iter__ start from the beginning, or set max_steps to what it has."
            )


def _deal(group: list[tuple[Any, Any]], local: int, accumulation: int, size: int) -> HostBatch:
    """Rows ordered (replica, micro-batch, slot); a short batch repeats its samples with weight 0.

    One larger than `size` has its own size, which does not depend on where reading began.
    """
    refuse_wrapping(group)  # here its row is still the loader's
    counts = [rows_of(part) for part in group]
    if max(counts) > size * local and jax.process_count() > 1:
        raise DataError(
            f"the loader gave a batch of {max(counts)} samples after one of at most {size * local}; of "
            "several processes each pads its batches to the first one. HINT: let the first be the largest."
        )
    size = max(size, -(-max(counts) // local))
    counts += [0] * (accumulation - len(counts))
    starts = np.cumsum([0, *counts[:-1]])
    replica = np.arange(local)[:, None, None]
    places = place_in_step(np.arange(size), 0, replica, rows=size, num_replicas=local)  # (replica, 1, slot)
    counts_here = np.array(counts)[None, :, None]
    weight = (places < counts_here).astype(np.float32)
    index = (starts[None, :, None] + places % np.maximum(counts_here, 1)) % sum(counts)
    inputs, targets = jax.tree.map(lambda *a: _joined(a)[index.reshape(-1)], *group)
    places = (starts[None, :, None] + places).reshape(-1)  # among this process's rows of the step
    return HostBatch(inputs, targets, weight.reshape(-1), sum(counts), places.astype(np.int64))


def _joined(leaves: tuple[np.ndarray, ...]) -> np.ndarray:
    if len(kinds := {leaf.shape[1:] for leaf in leaves}) > 1:
        raise DataError(
            f"the batches of one step have rows of shapes {', '.join(map(str, sorted(kinds)))}; "
            "gradient_accumulation_steps adds up batches of one shape. HINT: pad them to one length."
        )
    return np.concatenate(leaves)


def agreed(batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
    """`batches` with `total` summed over all ranks, until the last rank has run out."""
    if jax.process_count() == 1:
        yield from batches
        return
    iterator, last = iter(batches), None
    while True:
        host = next(iterator, None)
        total = int(multihost_utils.process_allgather(np.int64(host.total if host else 0)).sum())
        if not total:
            return
        last = host or last
        if last is None:
            raise DataError("this rank's loader is empty, peers have data. HINT: give each rank a sample.")
        yield last._replace(total=total, weight=last.weight if host else np.zeros_like(last.weight))


def rows_of(part: tuple[Any, Any]) -> int:
    return len(jax.tree.leaves(part)[0])
