"""From samples on the host to global batches on the devices, one step at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice

from jax.sharding import Mesh

from cyxjax.core.mesh import local_replicas
from cyxjax.core.step import Batch
from cyxjax.data.batches import BatchPlan, iterate, iterate_blocks
from cyxjax.data.labels import Check, unchecked
from cyxjax.data.ledger import StreamFacts
from cyxjax.data.loader import prefetch
from cyxjax.data.order import Order
from cyxjax.data.sources import LARGE_BYTES, ArrayDataset, Dataset
from cyxjax.launch import heartbeat
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.feeding.loader_reader import EvalLoader, LoaderReader
from cyxjax.train.feeding.loader_steps import agreed, steps
from cyxjax.train.feeding.placing import Keying, Placer, RowPlacer, Signal, unkeyed
from cyxjax.train.hooks.hook import Fed, Feed, Position, Tape
from cyxjax.train.settings import Reading, StepPlan
from cyxjax.train.start.dispatch import placer_for


def begin_reading(data: FitData, plan: StepPlan, reading: Reading, mesh: Mesh) -> FitData:
    """`data` with the reader of a loader, which has read its first step.

    Raises: DataError for an empty loader.
    """
    if data.indexed:
        return data
    reader = LoaderReader(
        data.train,
        len(local_replicas(mesh)),
        accumulation=plan.batch.accumulation,
        depth=reading.prefetch,
        steps_per_epoch=reading.steps_per_epoch,
        drop_last=reading.drop_last,
    )
    return data._replace(reader=reader, first=reader.first[:2])


def build_feed(
    data: FitData,
    plan: StepPlan,
    reading: Reading,
    mesh: Mesh,
    *,
    unpadded: bool = False,
    labels: Sequence[Check] = (unchecked, unchecked),
) -> Feed:
    """The batches of a fit: from datasets with an index, or from loaders.

    unpadded: a step that has the whole batch is not padded; see `RowPlacer`. labels: check those of training
    and validation data.
    """
    placer = placer_for(plan, mesh, unpadded=unpadded and plan.batch.accumulation == 1)
    val = None
    if data.val is not None:
        val_placer = placer_for(plan, mesh, unpadded=unpadded)
        size, most = plan.batch.batch_size, reading.max_eval_batches
        val = partial(eval_batches, val_placer, data.val, size, most, labels[1])
    if data.reader is not None:
        return loader_feed(data.reader, placer, data.keying, val, reading.steps_per_epoch, labels[0])
    assert reading.epoch is not None
    seed, shuffle = data.order or (reading.seed, reading.shuffle)
    return dataset_feed(
        placer,
        data.train,
        reading.epoch,
        val,
        seed=seed,
        shuffle=shuffle,
        depth=reading.prefetch,
        keying=data.keying,
        check=labels[0],
    )


def loader_feed(
    reader: LoaderReader,
    placer: Placer,
    keying: Keying,
    val: Callable[[], Iterable[Batch]] | None,
    steps_per_epoch: int | None,
    check: Check,
) -> Feed:
    """Batches of a loader, one per dispatch: the shape of the next one is not known. check: of its labels."""

    def train_batches(position: Position, ask: Callable[[], Signal], at_once: int) -> Iterator[Fed]:
        for number, (host, is_last) in enumerate(reader.epoch(position), position.step_in_epoch):
            check(host.targets, f": batch {number}", host.ids)
            drawn = keying(host, position.epoch)
            yield Fed(placer.put(drawn, ask()), host.stop, is_last, place=host.place)

    return Feed(train_batches, steps_per_epoch, val, reader.close)


def dataset_feed(
    placer: Placer,
    train: Dataset,
    plan: BatchPlan,
    val: Callable[[], Iterable[Batch]] | None,
    *,
    seed: int,
    shuffle: bool,
    depth: int,
    keying: Keying = unkeyed,
    check: Check = unchecked,
) -> Feed:
    """Batches of datasets with an index: each sample once per epoch, each step a function of its place.

    Delivered steps are noted on the feed's tape.
    """
    tape = Tape(StreamFacts(len(train), plan.global_batch_size, plan.drop_last, seed, shuffle))
    per_step = plan.global_batch_size // placer.num_shares * len(placer.shares)  # samples of this process

    def train_batches(position: Position, ask: Callable[[], Signal], at_once: int) -> Iterator[Fed]:
        order = Order(len(train), seed, position.epoch, shuffle)
        rest = plan.rest(position.samples)
        end = rest.first + rest.num_used
        # Gathering a few rows of arrays in memory is faster than passing them between threads.
        is_quick = isinstance(train, ArrayDataset) and train.row_bytes * per_step < LARGE_BYTES
        ahead = 0 if is_quick else -(-depth // at_once)
        blocks = iterate_blocks(train, order, rest, placer.shares, at_once if at_once > 1 else None)
        with closing(prefetch(blocks, ahead)) as read:
            for block in read:
                check(block.rows.targets, ids=block.rows.ids)
                together = 0  # steps of the block in one dispatch
                if at_once > 1:
                    assert isinstance(placer, RowPlacer)
                    together = sum(not placer.has_own_size(host) for host in block.steps)
                    if together:  # else it is the last step of the epoch alone, which carries the signal
                        rows = keying(block.rows, position.epoch)
                        batches = placer.put_steps(block._replace(rows=rows), at_once, ask())
                for i, host in enumerate(block.steps):
                    tape.note(position.epoch, host)
                    if i < together:
                        yield Fed(batches, host.stop, host.stop == end, i)
                    else:
                        drawn = keying(host, position.epoch)
                        yield Fed(placer.put(drawn, ask()), host.stop, host.stop == end)

    return Feed(train_batches, plan.num_steps, val, tape=tape)


def eval_batches(
    placer: Placer,
    dataset: Dataset | EvalLoader,
    batch_size: int,
    limit: int | None = None,
    check: Check = unchecked,
) -> Iterator[Batch]:
    """All samples of a Dataset once, in order, the last batch padded with weight 0; or a loader's batches."""
    total, where = None, ""  # the number of a loader's batches is not known
    if isinstance(dataset, EvalLoader):
        batches, where = agreed(steps(iter(dataset), len(placer.shares), 1)), ": batch {}"
    else:
        plan = BatchPlan(len(dataset), batch_size, placer.num_shares)
        batches = iterate(dataset, Order(len(dataset), shuffle=False), plan, placer.shares)
        total = plan.num_steps if limit is None else min(limit, plan.num_steps)
    for number, host in enumerate(islice(batches, limit)):
        heartbeat.part(number + 1, total)
        check(host.targets, where.format(number), host.ids)
        yield placer.put(host)
