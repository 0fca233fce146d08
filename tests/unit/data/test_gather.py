"""Rows of arrays in memory: by threads where a batch is large, with the rows that indexing gives."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from cyxjax.core.mesh import AXIS
from cyxjax.data import sources
from cyxjax.data.batches import BatchPlan
from cyxjax.data.sources import ArrayDataset
from cyxjax.train.feeding import feed
from cyxjax.train.feeding.placing import RowPlacer
from cyxjax.train.hooks.hook import Position

ARRAY = np.random.default_rng(0).normal(size=(40, 6, 5))


@pytest.fixture
def all_is_large(monkeypatch):
    monkeypatch.setattr(sources, "LARGE_BYTES", 0)
    monkeypatch.setattr(sources.os, "cpu_count", lambda: 8)


@pytest.mark.parametrize("indices", [[3, 3, 39, 0, 17], list(range(40)), [-1, -40, 5], [7]], ids=len)
@pytest.mark.parametrize("array", [ARRAY, ARRAY[:, ::2], ARRAY.astype(">f4"), ARRAY[:, 0, 0] > 0])
def test_threads_gather_the_rows_that_indexing_gives(all_is_large, array, indices):
    found = sources.gathered_rows(array, np.array(indices))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array[indices])


@pytest.mark.parametrize("place", [40, -41])
def test_a_row_that_is_not_there_is_refused_by_threads_too(all_is_large, place):
    with pytest.raises(IndexError, match="rows .* 40$"):
        sources.gathered_rows(ARRAY, np.array([0, place]))


def test_only_large_batches_start_threads(monkeypatch):
    monkeypatch.setattr(sources, "ThreadPoolExecutor", None)  # cannot be called
    assert sources.gathered_rows(ARRAY, np.arange(9)).shape == (9, 6, 5)


@pytest.mark.parametrize("large", [True, False])
def test_large_batches_are_read_ahead(monkeypatch, large):
    data, plan = ArrayDataset(ARRAY.astype(np.float32), np.arange(40)), BatchPlan(40, 10, 1)
    assert data.row_bytes == 30 * 4 + 8
    monkeypatch.setattr(feed, "LARGE_BYTES", 10 * data.row_bytes + (not large))
    placer = RowPlacer(Mesh(np.array(jax.devices()[:1]), (AXIS,)))
    fed = feed.dataset_feed(placer, data, plan, None, seed=0, shuffle=True, depth=2)
    batches = fed.train(Position(), lambda: (0.0, False))
    next(batches)
    readers = [thread for thread in threading.enumerate() if thread.name == "cyxjax-prefetch"]
    assert len(readers) == large
    batches.close()
