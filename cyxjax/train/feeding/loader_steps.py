"""A loader's batches as steps: split over this process's replicas, synchronized with the other ranks.

One loader per process, as in torch: each yields this process's samples. Ranks may run out of data at
different times: they agree on each step's number of samples, and a rank without any takes part with weight 0.
"""

import itertools
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyxjax.core.draws import place_in_step
from cyxjax.data.batches import HostBatch
from cyxjax.errors import DataError


class LoaderBatch(NamedTuple):
    """A batch of a loader on this process."""

    pair: tuple[Any, Any]  # inputs and targets; further rows than `own` has places only fill up the batch
    own: range  # the places of its samples among those of all ranks; `own.stop` is their number
    place: Any  # the loader's own position after it
    number: int = 0  # of its pass over the loader


def steps(
    batches: Iterator[LoaderBatch], local: int, accumulation: int, size: int = 0
) -> Iterator[HostBatch]:
    """`accumulation` batches of a pass as a step's rows for `local` shares, padded to `size` or as the first.

    The last step of a pass may have fewer batches. `total` counts this process's samples. `places` count the
    samples of all ranks, from 0 at the step's first; `ids` the rows of this process's batches.
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
    rows = [rows_of(pair) for pair in pairs]
    if max(rows) > size * local and jax.process_count() > 1:
        raise DataError(
            f"the loader gave a batch of {max(rows)} samples after one of at most {size * local}; with "
            "several processes, each pads its batches to the first. HINT: let the first be the largest."
        )
    if len(pairs) > 1:
        _refuse_several_shapes(pairs, accumulation)
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
    total = sum(len(batch.own) for batch in group)
    return HostBatch(
        inputs,
        targets,
        weight.reshape(-1),
        total,
        places.reshape(-1),
        ids=index.reshape(-1),
        place=group[-1].place,
    )


def _refuse_several_shapes(pairs: list[tuple[Any, Any]], accumulation: int) -> None:
    """Raises: DataError unless the samples of all batches of a step have one shape."""
    shapes = {str(jax.tree.map(lambda leaf: np.shape(leaf)[1:], pair)): None for pair in pairs}
    if len(shapes) > 1:
        raise DataError(
            f"the samples of two batches of one optimizer step have the shapes {' and '.join(shapes)}, but "
            f"gradient_accumulation_steps={accumulation} joins its batches. HINT: give batches of one shape "
            f"{accumulation} times in a row, pad them to one shape, or set gradient_accumulation_steps=1."
        )


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
