"""Assigns places of the epoch's order to steps, replicas, micro-batches and slots, with padding and weights.

    step t sees places [first + t*G, first + (t+1)*G),   G = batch_size * num_replicas * accumulation
    place of (replica r, micro-batch m, slot j) in step t:   first + t*G + m*B*R + j*R + r   (core/draws)

`first` is 0, or the place at which a resumed run continues: samples are counted, not batches, so the rest of
an epoch is assigned with the current batch size and world size.

Assigning with a stride balances a short last batch: replicas differ by at most one real sample, and the
set of samples in a micro-batch does not depend on how many replicas share it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cyxjax.core.draws import place_in_step
from cyxjax.data.columns import map_leaves
from cyxjax.data.order import Order, Places
from cyxjax.data.sources import ArrayDataset, Dataset
from cyxjax.errors import ConfigError, DataError

# Permuting a block costs hardly more than permuting a batch: 1 ms of numpy calls, regardless of length.
_PLACES_AT_ONCE = 1 << 13
# Several small batches are gathered together: 64 rows of 16 numbers took 20 us alone, 3 us among 1,024.
# Larger ones gain nothing, and exceed the processor's cache.
_BYTES_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of an epoch from place `first` on become steps of equal shape: the only place that
    counts steps of an epoch. No sample is dropped unless `drop_last`.
    """

    num_samples: int
    batch_size: int
    num_replicas: int = 1
    accumulation: int = 1
    drop_last: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        if self.num_steps == 0 and not self.first:
            raise DataError(
                f"drop_last=True leaves no step: {self.num_samples} samples are fewer than one global batch "
                f"of {self.global_batch_size}. HINT: use drop_last=False or a smaller batch_size."
            )

    @cached_property  # like the next one: read several times per step
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all replicas and micro-batches, padding included."""
        return self.batch_size * self.num_replicas * self.accumulation

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps from `first` to the end of the epoch; 0 only if `first` is (nearly) its end."""
        short = 0 if self.drop_last else self.global_batch_size - 1
        return max(self.num_samples - self.first + short, 0) // self.global_batch_size

    @property
    def num_used(self) -> int:
        """Real samples of these steps: all from `first` on, or whole global batches with `drop_last`."""
        return max(min(self.num_samples - self.first, self.num_steps * self.global_batch_size), 0)

    def rest(self, first: int) -> "BatchPlan":
        """The plan for what is left of an epoch of which `first` samples were consumed."""
        return replace(self, first=first)

    def span(self, step: int) -> tuple[int, int]:
        """(the first place of `step`, one past its last real place): samples consumed before and after it."""
        start = self.first + step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.num_samples)

    def places(self, step: int, replicas: Sequence[int]) -> Places:
        """Places of `replicas` in `step`: int64, shape (len(replicas), accumulation, batch_size).

        Places from num_samples on are padding: weight 0, and the sample at `read_from`.
        """
        replica = np.asarray(replicas, np.int64)[:, None, None]
        micro = np.arange(self.accumulation, dtype=np.int64)[None, :, None]
        slot = np.arange(self.batch_size, dtype=np.int64)[None, None, :]
        shape = {"rows": self.batch_size, "num_replicas": self.num_replicas}
        return self.span(step)[0] + place_in_step(slot, micro, replica, **shape)

    def read_from(self, places: Places) -> Places:
        """The places whose samples are read: padding repeats those of the last step, which it pads.

        So a value that is not finite reaches only the step of its sample: 0 * NaN is NaN.
        """
        first, stop = self.span(self.num_steps - 1)
        return np.where(places < self.num_samples, places, first + (places - first) % (stop - first))


class HostBatch(NamedTuple):
    """One step's rows for this process's replicas, ordered (replica, micro-batch, slot), in numpy."""

    inputs: Any  # pytree of arrays, first dimension = rows
    targets: Any  # the same
    weight: npt.NDArray[np.float32]  # shape (rows,): 1 for a real sample, 0 for padding
    total: int  # real samples in the step over ALL replicas; equal on every rank
    places: Places  # shape (rows,): place in the epoch's order; the key of a row's random draws
    ids: Places | None = None  # shape (rows,): the samples that were read; None if they have no ids
    stop: int = 0  # samples of the epoch consumed with this step, over ALL replicas; it began at stop - total
    place: Any = None  # the position that a loader reports after this step


class HostBlock(NamedTuple):
    """Consecutive steps that were read together."""

    steps: list[HostBatch]  # views of `rows`, without the steps that only fill the block
    rows: HostBatch  # the rows of all steps, one after another; total and stop are those of the last one


def iterate(dataset: Dataset, order: Order, plan: BatchPlan, replicas: Sequence[int]) -> Iterator[HostBatch]:
    """The epoch's batches for `replicas`.

    Batch t depends only on (order, plan, t), so `plan.rest(s)` continues at sample s without reading the
    samples before it.
    """
    for block in iterate_blocks(dataset, order, plan, replicas):
        yield from block.steps


def iterate_blocks(
    dataset: Dataset,
    order: Order,
    plan: BatchPlan,
    replicas: Sequence[int],
    size: int | None = None,
) -> Iterator[HostBlock]:
    """Like `iterate`, in blocks of `size` steps; the last block is filled up with samples of the last step.

    size None: as many steps as are fastest to read together, and a last block that may be shorter.
    """
    first_step = plan.places(0, replicas).reshape(-1)
    each = size or _steps_at_once(dataset, len(first_step))
    at_once = max(1, _PLACES_AT_ONCE // (len(first_step) * each or 1)) * each
    for first in range(0, plan.num_steps, at_once):
        end = min(first + at_once, plan.num_steps)
        filled = end if size is None else first + -(-(end - first) // size) * size
        places = first_step + np.arange(first, filled)[:, None] * plan.global_batch_size
        indices = order[plan.read_from(places)]
        for some in range(first, end, each):
            these = slice(some - first, some - first + each)
            steps = range(some, min(some + each, end))
            yield _read(dataset, plan, steps, places[these], indices[these])


def read_batch(
    dataset: Dataset, order: Order, plan: BatchPlan, replicas: Sequence[int], step: int
) -> HostBatch:
    """The rows of `replicas` in one step."""
    places = plan.places(step, replicas).reshape(1, -1)
    return _read(dataset, plan, [step], places, order[plan.read_from(places)]).steps[0]


def _steps_at_once(dataset: Dataset, rows: int) -> int:
    """The number of steps of `rows` rows gathered per call: one, unless the arrays are in memory."""
    row_bytes = dataset.row_bytes if isinstance(dataset, ArrayDataset) else _BYTES_AT_ONCE
    return max(1, _BYTES_AT_ONCE // max(1, rows * row_bytes))


def _read(
    dataset: Dataset, plan: BatchPlan, steps: Sequence[int], places: Places, indices: Places
) -> HostBlock:
    """The batches of `steps`, whose places and samples are the first rows of `places` and `indices`."""
    inputs, targets = dataset.take(indices.reshape(-1))
    weight = (places < plan.num_samples).astype(np.float32)
    rows, made = places.shape[1], []
    for i, (start, stop) in enumerate(map(plan.span, steps)):
        mine = itemgetter(slice(i * rows, (i + 1) * rows))  # not a Python function, to save time
        x = map_leaves(mine, inputs)
        y = x if targets is inputs else map_leaves(mine, targets)
        made.append(HostBatch(x, y, weight[i], stop - start, places[i], indices[i], stop))
    flat = made[-1]._replace(
        inputs=inputs, targets=targets, weight=weight.reshape(-1), places=places.reshape(-1)
    )
    return HostBlock(made, flat._replace(ids=indices.reshape(-1)))


def batch_size_from_global(global_batch_size: int, num_replicas: int, accumulation: int = 1) -> int:
    """Samples per replica and micro-step if all of them share `global_batch_size`.

    Raises: ConfigError if it is not divisible, with the nearest global batch sizes that are.
    """
    shares = num_replicas * accumulation
    if global_batch_size >= shares and global_batch_size % shares == 0:
        return global_batch_size // shares
    below = global_batch_size // shares * shares
    fits = f"{below} or {below + shares}" if below > 0 else f"{shares}"
    raise ConfigError(
        f"global_batch_size={global_batch_size} is not divisible by {num_replicas} replicas x "
        f"{accumulation} gradient accumulation steps = {shares}. HINT: use {fits}."
    )
