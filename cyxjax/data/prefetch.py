"""Reads an iterable ahead in a background thread."""

import threading
from collections.abc import Generator, Iterable
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()
_STUCK_S = 5.0  # a source that does not come back by then is left behind: its thread is a daemon


def prefetch(source: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Items of `source` in order, read up to `depth` ahead by a background thread; depth 0 reads inline.

    It is a generator: `close()` it where the loop may end early, and thread and source end too. An error of
    the source is raised after the items before it, with the traceback it was raised with.
    """
    if depth == 0:
        yield from source
        return
    ready: Queue[tuple[Any, BaseException | None]] = Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_read, args=(source, ready, stopped), name="cyxjax-prefetch", daemon=True
    )
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        with suppress(Empty):  # the thread may wait for room
            while True:
                ready.get_nowait()
        thread.join(_STUCK_S)


def _read(
    source: Iterable[Any], ready: Queue[tuple[Any, BaseException | None]], stopped: threading.Event
) -> None:
    """Body of the thread. Everything raised is handed over, also an interpreter exit: nothing is lost."""
    error: BaseException | None = None
    try:
        iterator = iter(source)
        for item in iterator:
            ready.put((item, None))
            del item  # a batch should not live on while the thread reads the next one
            if stopped.is_set():
                break
        if hasattr(iterator, "close"):  # a generator's `finally` blocks run now
            iterator.close()
    except BaseException as raised:
        error = raised
    if not stopped.is_set():
        ready.put((_END, error))
