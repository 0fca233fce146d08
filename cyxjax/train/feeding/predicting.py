"""Prediction: the outputs of a model for arrays, datasets and loaders, in order, on every rank."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cyxjax.core.evaluation import EvalState
from cyxjax.core.mesh import local_replicas, num_replicas, put_rows
from cyxjax.core.trees import PyTree
from cyxjax.data.columns import as_array, is_frame, matrix_of, stack
from cyxjax.data.sources import ArrayDataset, Dataset, has_items
from cyxjax.data.streams import RowBatches, as_rows
from cyxjax.errors import DataError, DesyncError
from cyxjax.train.feeding.fit_data import EVAL_ROWS, for_evaluation, is_loader, one_sample, unsplit
from cyxjax.train.feeding.loader_reader import EvalLoader

_ROWS_AT_ONCE = 1024  # read at a time from a dataset


class Source(NamedTuple):
    """Rows to predict."""

    compared: Any  # a Dataset, which ranks compare, or a loader, whose batches they compare
    first: PyTree  # one sample's inputs, shape (1, ...)
    blocks: Callable[[int], Iterator[PyTree]]  # (most rows per block) -> inputs, block by block


def source_of(X: Any, trained_on: PyTree = None) -> Source:
    """Rows of arrays (any tree of them), of a dataset by number, or of a loader batch by batch.

    A list holds samples, as in `fit`: arrays, lists of numbers, or tuples or dicts with their targets. A
    loader of cyxjax that gives all samples is read in the order of its dataset, even if it shuffles.
    trained_on: one sample's inputs, shape (1, ...), if known; a frame with as many columns holds no targets.
    """
    if is_frame(X) and getattr(trained_on, "shape", None) == (1, len(X.columns)):
        X = matrix_of(X)
    if isinstance(X, list) and X and not isinstance(X[0], tuple | dict):
        X = stack(X)
    if _is_tree(X):
        X = jax.tree.map(as_array, X)
        rows, first = tuple(jax.tree.leaves(X)), jax.tree.map(lambda a: a[:1], X)
        return Source(ArrayDataset(rows, rows), first, lambda _: iter([X]))
    stream = as_rows(X)
    # All ranks read all samples of a stream.
    data = for_evaluation(X) if stream is None else EvalLoader(RowBatches(stream, EVAL_ROWS, 0, 1))
    return Source(data, one_sample(unsplit(data))[0], partial(_blocks, data))


def _is_tree(X: Any) -> bool:
    """An array (which has a length and a `take` too) or a tree of arrays; not a dataset or a loader."""
    if hasattr(X, "dtype") or isinstance(X, Mapping | tuple):
        return True
    return not (is_loader(X) or isinstance(X, Dataset) or has_items(X))


def _blocks(data: Any, rows: int) -> Iterator[PyTree]:
    if isinstance(data, EvalLoader):
        yield from _alike(batch.pair[0] for batch in data)
        return
    for start in range(0, len(data), rows):
        yield data.take(np.arange(start, min(start + rows, len(data))))[0]


def _alike(batches: Iterable[PyTree]) -> Iterator[PyTree]:
    """`batches`, which are the same on all ranks. Raises: DesyncError if the loaders of two ranks differ."""
    if jax.process_count() == 1:
        yield from batches
        return
    for inputs in chain(batches, [None]):  # None: the loader of this rank has ended
        content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(inputs))
        mine = 0 if inputs is None else 1 + zlib.crc32(content) % 2**30  # jax keeps 32 bits of it
        ranks = multihost_utils.process_allgather(np.int64(mine))
        if (ranks != mine).any():
            raise DesyncError(
                "predict: the loaders of the ranks give different samples. HINT: give all ranks the same "
                "loader or stream, without a DistributedSampler: the rows are divided among the devices."
            )
        if inputs is not None:
            yield inputs


def predict_all(predict_step: Callable, state: EvalState, mesh: Mesh, source: Source, each: int) -> PyTree:
    """The outputs as NumPy arrays, one row per row of `source`. An output without rows is returned once.

    each: samples per replica and call. Every rank passes the same rows.
    """
    per_step = each * num_replicas(mesh)
    blocks = source.blocks(per_step * max(1, _ROWS_AT_ONCE // per_step))
    parts = [part for inputs in blocks for part in _predicted(predict_step, state, mesh, inputs, each)]
    if not parts:
        raise DataError("nothing to predict: 0 samples. HINT: check the filter they came from.")
    # Copies: a numpy view of a CPU buffer keeps its client alive.
    return jax.tree.map(lambda *p: np.concatenate(p) if p[0].ndim else np.array(p[0]), *parts)


def _predicted(
    predict_step: Callable, state: EvalState, mesh: Mesh, inputs: PyTree, each: int
) -> Iterator[PyTree]:
    rows, mine, per_step = len(jax.tree.leaves(inputs)[0]), local_replicas(mesh), each * num_replicas(mesh)
    for start in range(0, rows, per_step):
        # The last batch is filled up with the first rows; the surplus is cut off below.
        places = np.arange(start + mine.start * each, start + mine.stop * each) % rows
        batch = put_rows(mesh, jax.tree.map(lambda a, p=places: np.asarray(a)[p], inputs))
        made = multihost_utils.process_allgather(predict_step(state, batch), tiled=True)
        yield jax.tree.map(lambda a: a[: rows - start] if a.ndim else a, made)  # noqa: B023
