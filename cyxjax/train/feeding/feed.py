"""From samples on the host to global batches on the devices, one step at a time."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cyxjax.core.draws import place_in_step
from cyxjax.core.mesh import refuse_wrapping
from cyxjax.core.step import Batch
from cyxjax.data.batches import BatchPlan, HostBatch, iterate
from cyxjax.data.ledger import StreamFacts
from cyxjax.data.loader import tell_epoch
from cyxjax.data.order import Order
from cyxjax.data.prefetch import prefetch
from cyxjax.data.sources import ArrayDataset, Dataset, as_batches
from cyxjax.errors import DataError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.feeding.fit_data import FitData, is_loader
from cyxjax.train.feeding.placing import Placer, RowPlacer
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.loop import Fed, Feed, Position
from cyxjax.train.settings import Reading, StepPlan
from cyxjax.train.start.dispatch import dispatch_for

PyTree = Any


Ask = Callable[[], tuple[float, bool]]


def build_feed(data: FitData, plan: StepPlan, reading: Reading, mesh: Mesh, tape: Tape) -> Feed:
    """The batches of a fit: from datasets with an index, or from loaders."""
    if reading.epoch is None:
        return loader_feed(
            mesh,
            data.train,
            data.val,
            accumulation=plan.batch.accumulation,
            depth=reading.prefetch,
            eval_batch_size=plan.batch.batch_size,
            max_eval_batches=reading.max_eval_batches,
        )
    seed, shuffle = data.order or (reading.seed, reading.shuffle)
    return dataset_feed(
        dispatch_for(plan, mesh).placer(),
        data.train,
        reading.epoch,
        data.val,
        seed=seed,
        shuffle=shuffle,
        depth=reading.prefetch,
        max_eval_batches=reading.max_eval_batches,
        tape=tape,
    )


def dataset_feed(
    placer: Placer,
    train: Dataset,
    plan: BatchPlan,
    val: Dataset | Iterable[Any] | None,
    *,
    seed: int,
    shuffle: bool,
    depth: int,
    max_eval_batches: int | None = None,
    tape: Tape | None = None,
) -> Feed:
    """Batches of datasets with an index: each sample once an epoch, each step a function of its place.

    What is delivered is noted on `tape`.
    """
    tape, warn = tape or Tape(), _warner()
    tape.facts = StreamFacts(len(train), plan.global_batch_size, plan.drop_last, seed, shuffle)

    def train_batches(position: Position, ask: Ask) -> Iterator[Fed]:
        order = Order(len(train), seed, position.epoch, shuffle)
        rest = plan.rest(_first_place(plan, position, warn))
        # Gathering rows of arrays in memory is cheaper than handing them from one thread to another.
        ahead = 0 if isinstance(train, ArrayDataset) else depth
        with prefetch(iterate(train, order, rest, placer.shares), ahead) as batches:
            for host in batches:
                tape.note(position.epoch, host)
                is_last = host.stop == rest.first + rest.num_used
                yield Fed(placer.put(host, ask()), host.stop, is_last)

    val_batches = partial(eval_batches, placer, val, plan.batch_size, max_eval_batches)
    return Feed(train_batches, plan.num_steps, None if val is None else val_batches)


def eval_batches(placer: Placer, dataset: Any, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """All samples of a Dataset once, in order, the last batch padded with weight 0; or a loader's batches."""
    if is_loader(dataset):
        yield from map(placer.put, islice(_agreed(_stream(len(placer.shares), dataset, 1)), limit))
        return
    order = Order(len(dataset), shuffle=False)
    plan = BatchPlan(len(dataset), batch_size, placer.num_shares)
    for host in islice(iterate(dataset, order, plan, placer.shares), limit):
        yield placer.put(host)


def loader_feed(
    mesh: Mesh,
    train: Iterable[Any],
    val: Dataset | Iterable[Any] | None,
    *,
    accumulation: int,
    depth: int,
    eval_batch_size: int,
    max_eval_batches: int | None = None,
) -> Feed:
    """Batches of loaders, one loader a process, as under torch: each yields this process's samples.

    Ranks may run out of data at different times: they agree on each step's number of samples, and a rank
    without any takes part with weight 0.
    """
    placer, warn = RowPlacer(mesh), _warner()

    def train_batches(position: Position, ask: Ask) -> Iterator[Fed]:
        tell_epoch(train, position.epoch)
        with prefetch(_stream(len(placer.shares), train, accumulation), depth) as batches:
            empty = True
            for host in _passed_over(_agreed(batches), position, warn):
                empty = False
                yield Fed(placer.put(host, ask()), host.stop)
        if empty and not position.step_in_epoch:
            raise DataError(
                f"the loader gave no batch in epoch {position.epoch}; it gave some before. HINT: let its "
                "__iter__ begin anew each time."
            )

    val_batches = partial(eval_batches, placer, val, eval_batch_size, max_eval_batches)
    return Feed(train_batches, None, None if val is None else val_batches)


def _stream(local: int, loader: Iterable[Any], accumulation: int) -> Iterator[HostBatch]:
    """`accumulation` loader batches as one step's rows for `local` shares; the first one fixes how many."""
    batches, size = as_batches(loader), 0
    if accumulation > 1:  # a loader may fill the same arrays again for its next batch
        batches = (jax.tree.map(np.array, batch) for batch in batches)
    while group := list(islice(batches, accumulation)):
        size = size or -(-_rows(group[0]) // local)
        yield _deal(group, local, accumulation, size)


def _deal(group: list[tuple[Any, Any]], local: int, accumulation: int, size: int) -> HostBatch:
    """Rows ordered (replica, micro-batch, slot); a short batch repeats its samples with weight 0."""
    refuse_wrapping(group)  # here its row is still the loader's
    counts = [_rows(part) for part in group]
    if max(counts) > size * local:
        raise DataError(
            f"the loader gave a batch of {max(counts)} samples after one of at most {size * local}; "
            "expected its first batch to be the largest. HINT: let only the last batch be short."
        )
    counts += [0] * (accumulation - len(counts))
    starts = np.cumsum([0, *counts[:-1]])
    replica = np.arange(local)[:, None, None]
    places = place_in_step(np.arange(size), 0, replica, rows=size, num_replicas=local)  # (replica, 1, slot)
    counts_here = np.array(counts)[None, :, None]
    weight = (places < counts_here).astype(np.float32)
    index = (starts[None, :, None] + places % np.maximum(counts_here, 1)) % sum(counts)
    inputs, targets = jax.tree.map(lambda *a: np.concatenate(a)[index.reshape(-1)], *group)
    places = np.broadcast_to(places, index.shape).reshape(-1)
    return HostBatch(inputs, targets, weight.reshape(-1), sum(counts), places.astype(np.int64))


def _agreed(batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
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


def _warner() -> Callable[[str], None]:
    """Says a line on rank 0."""
    return warn_on_stderr if jax.process_index() == 0 else lambda text: None


def _first_place(plan: BatchPlan, position: Position, warn: Callable[[str], None]) -> int:
    """The place of the epoch's order from which to go on."""
    if position.samples or not position.step_in_epoch:
        return position.samples
    first = min(position.step_in_epoch * plan.global_batch_size, plan.num_samples)
    warn(
        f"WARNING: the checkpoint says {position.step_in_epoch} steps of epoch {position.epoch} and not of "
        f"how many samples; taken for steps of {plan.global_batch_size}: going on from sample {first}. "
        "HINT: if the batch size or the number of processes was another one, begin the run anew."
    )
    return first


def _passed_over(
    batches: Iterable[HostBatch], position: Position, warn: Callable[[str], None]
) -> Iterator[HostBatch]:
    """The batches of a loader after those that were consumed, each with its `stop`.

    A loader of other batches than before cannot be read from the middle of one: it goes on with the first
    batch that holds a sample after the place, and says so.
    """
    seen = 0
    for step, host in enumerate(batches):
        before, seen = seen, seen + host.total
        if not position.samples and step < position.step_in_epoch:
            continue  # a checkpoint of before samples were counted
        if seen <= position.samples:
            continue
        if before <= position.samples and position.samples and (before, step) != position[2:]:
            again = position.samples - before
            warn(
                f"WARNING: {position.samples} samples of epoch {position.epoch} were consumed in "
                f"{position.step_in_epoch} steps; the loader's batches are of another size now. Going on "
                f"after its first {step} steps, {before} samples: {again} of them may come twice, and which "
                "they are only the loader knows. HINT: resume with the batch size and number of processes "
                "of before, or give fit a dataset."
            )
        yield host._replace(stop=seen)


def _rows(part: tuple[Any, Any]) -> int:
    return len(jax.tree.leaves(part)[0])
