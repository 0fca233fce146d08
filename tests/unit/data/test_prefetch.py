"""Reading ahead: order, errors with their traceback, and threads that end."""

import gc
import sys
import threading
import time
import traceback

import pytest

from cyxjax.data.prefetch import prefetch


def reading_threads():
    return [t for t in threading.enumerate() if t.name == "cyxjax-prefetch"]


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert eventually(lambda: not reading_threads())


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_items_come_in_order(depth):
    with prefetch(iter(range(50)), depth) as items:
        assert list(items) == list(range(50))
        assert next(items, "end") == "end"


def test_it_reads_ahead_up_to_depth_and_no_further():
    read = []
    with prefetch((read.append(i) or i for i in range(100)), 3) as items:
        # three wait in the queue and a fourth is in the thread's hand
        assert eventually(lambda: len(read) == 4)
        time.sleep(0.05)
        assert len(read) == 4
        assert next(items) == 0
        assert eventually(lambda: len(read) == 5)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it_with_its_traceback(depth):
    def broken_source():
        yield 1
        yield 2
        raise OSError("shard 3")

    with prefetch(broken_source(), depth) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(OSError, match="shard 3") as caught:
            next(items)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "broken_source" in frames
        assert next(items, "end") == "end"


def test_an_iterable_that_cannot_be_iterated_is_reported_to_the_consumer():
    with prefetch(7, 2) as items, pytest.raises(TypeError, match="'int'"):
        next(items)


@pytest.mark.parametrize("depth", [0, 2])
def test_closing_early_ends_the_thread_and_the_source(depth):
    ended = []

    def source():
        try:
            yield from range(10**9)
        finally:
            ended.append(True)

    with prefetch(source(), depth) as items:
        assert next(items) == 0
    assert ended == [True]
    assert not reading_threads()
    items.close()  # twice is allowed


def test_a_forgotten_iterator_ends_its_thread():
    items = prefetch(iter(range(10**9)), 2)
    assert next(items) == 0
    assert len(reading_threads()) == 1
    del items
    gc.collect()
    assert eventually(lambda: not reading_threads())


@pytest.mark.parametrize("depth", [0, 1])
def test_waiting_is_measured(depth):
    consumer, waited = threading.get_ident(), []

    def consumer_waits():
        frames = traceback.extract_stack(sys._current_frames()[consumer])
        return depth == 0 or any(frame.name == "wait_for" for frame in frames)

    def source():
        assert eventually(consumer_waits)
        start = time.perf_counter()
        time.sleep(0.01)
        waited.append(time.perf_counter() - start)
        yield 7

    with prefetch(source(), depth) as items:
        assert next(items) == 7
        assert items.wait_s >= waited[0]  # the consumer waited before `start`, and until the item came


def test_a_consumer_that_is_slower_than_the_source_hardly_waits():
    gate = threading.Event()

    def quick():
        yield from range(3)
        gate.set()

    with prefetch(quick(), 5) as items:
        assert gate.wait(20)
        before = items.wait_s
        assert list(items) == [0, 1, 2]
        assert items.wait_s - before < 5
