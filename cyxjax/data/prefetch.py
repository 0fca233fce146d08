"""Prefetching by a bounded background thread, and the time that the loop waited for data."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Channel:
    """Where the reading thread and the consumer meet; the thread holds this and not the `Prefetch`."""

    def __init__(self, depth: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Any] = deque()
        self.depth = depth
        self.finished = False  # the source ended or raised
        self.stopped = False  # the consumer went away
        self.error: BaseException | None = None

    def put(self, item: Any) -> bool:
        """Waits for room, then stores `item`; False when the consumer has stopped."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or len(self.ready) < self.depth)
            if not self.stopped:
                self.ready.append(item)
                self.changed.notify_all()
            return not self.stopped

    def finish(self, error: BaseException | None) -> None:
        with self.changed:
            self.finished, self.error = True, error
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()


class Prefetch(Generic[T]):
    """An iterator over `source` that reads up to `depth` items ahead; see `prefetch`."""

    def __init__(self, source: Iterable[T], depth: int) -> None:
        self.wait_s = 0.0  # seconds the consumer has waited for items so far
        self._channel = _Channel(depth)
        self._thread = threading.Thread(
            target=_read, args=(source, self._channel), name="cyxjax-prefetch", daemon=True
        )
        # A consumer that forgets the iterator ends the thread too: neither keeps the other alive.
        self._finalizer = weakref.finalize(self, self._channel.stop)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item; an error of the source is raised here, with the traceback it was raised with."""
        channel, start = self._channel, time.perf_counter()
        with channel.changed:
            channel.changed.wait_for(lambda: channel.ready or channel.finished or channel.stopped)
            self.wait_s += time.perf_counter() - start
            if channel.ready:
                channel.changed.notify_all()
                return channel.ready.popleft()
            error, channel.error = channel.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and drops what it read. May be called twice; a source that is stuck is left behind
        after `timeout_s` (the thread is a daemon and cannot hold up the exit of the program)."""
        self._finalizer()
        self._thread.join(timeout_s)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Inline(Generic[T]):
    """`Prefetch` without a thread, for depth 0: items are read when asked for, and all of it is waiting."""

    def __init__(self, source: Iterable[T]) -> None:
        self.wait_s = 0.0
        self._iterator = iter(source)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return next(self._iterator)
        finally:
            self.wait_s += time.perf_counter() - start

    def close(self) -> None:
        """Closes the source, if it is a generator."""
        _close(self._iterator)

    def __enter__(self) -> "Inline[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch(source: Iterable[T], depth: int = 2) -> Prefetch[T] | Inline[T]:
    """Items of `source` in order, read up to `depth` ahead by a background thread; depth 0 reads inline.

    Use it as a context manager, or call `close()`, so that the thread ends when the loop ends early.
    `.wait_s` is the time the consumer has spent waiting: input-bound training shows there.
    """
    return Prefetch(source, depth) if depth > 0 else Inline(source)


def _read(source: Iterable[Any], channel: _Channel) -> None:
    """Body of the thread. Everything raised is handed over, also an interpreter exit: nothing is lost."""
    error: BaseException | None = None
    iterator: Any = None
    try:
        iterator = iter(source)
        for item in iterator:
            if not channel.put(item):
                break
            del item  # a batch should not live on while the thread waits for the next one
        _close(iterator)
    except BaseException as raised:
        error = raised
    channel.finish(error)


def _close(iterator: Any) -> None:
    """Ends a generator where it stands, so that its `finally` blocks run now; iterators have no close."""
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
