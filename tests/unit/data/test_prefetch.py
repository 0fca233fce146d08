"""Reading ahead: order, errors with their traceback, and threads that end."""

import threading
import time
import traceback
from contextlib import closing

import jax
import numpy as np
import pytest

from cyxjax.core.mesh import build_mesh
from cyxjax.data.batches import BatchPlan
from cyxjax.data.loader import prefetch
from cyxjax.data.sources import ArrayDataset
from cyxjax.train.feeding import feed
from cyxjax.train.feeding.placing import RowPlacer
from cyxjax.train.hooks.hook import Position
from tests.support.programs import fresh
from tests.support.waiting import until


def reading_threads():
    return [t for t in threading.enumerate() if t.name == "cyxjax-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert until(lambda: not reading_threads(), 20)


def test_it_reads_ahead_up_to_depth_and_no_further():
    read = []
    with closing(prefetch((read.append(i) or i for i in range(100)), 3)) as items:
        assert next(items) == 0
        # three wait in the queue, and the thread has a fourth
        assert until(lambda: len(read) == 5, 20)
        time.sleep(0.05)
        assert len(read) == 5
        assert list(items) == list(range(1, 100))


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it_with_its_traceback(depth):
    def broken_source():
        yield 1
        yield 2
        raise OSError("shard 3")

    items = prefetch(broken_source(), depth)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="shard 3") as caught:
        next(items)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "broken_source" in frames
    assert next(items, "end") == "end"
    with pytest.raises(TypeError, match="'int'"):
        next(prefetch(7, depth))


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_ending_early_ends_the_thread_and_the_source(depth, how):
    ended = []

    def source():
        try:
            yield from range(10**9)
        finally:
            ended.append(True)

    items = prefetch(source(), depth)
    assert next(items) == 0
    assert len(reading_threads()) == (depth > 0)
    if how == "closed":
        items.close()
        items.close()  # a second close is allowed
    del items
    assert ended == [True]
    assert not reading_threads()


@pytest.mark.parametrize("large", [True, False])
def test_large_batches_of_a_fit_are_read_ahead(monkeypatch, large):
    data, plan = ArrayDataset(np.zeros((40, 9000), np.float32), np.arange(40)), BatchPlan(40, 10)
    assert data.row_bytes == 9000 * 4 + 8  # a step of fewer bytes is read together with others
    monkeypatch.setattr(feed, "LARGE_BYTES", 10 * data.row_bytes + (not large))
    placer = RowPlacer(build_mesh(jax.devices()[:1]))
    batches = feed.dataset_feed(placer, data, plan, None, seed=0, shuffle=True, depth=2).train(
        Position(), lambda: (0.0, False), 1
    )
    next(batches)
    assert len(reading_threads()) == large
    batches.close()


def test_a_program_may_end_before_its_last_item():
    done = fresh("-c", "from cyxjax.data.loader import prefetch\nitems = prefetch(range(9))\nnext(items)")
    assert (done.returncode, done.stderr) == (0, "")
