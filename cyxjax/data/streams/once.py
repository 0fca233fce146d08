"""Batches that somebody has already: in a list, or from an iterator that is read once."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class Batches:
    """A list (or anything that begins anew when iterated) of batches (inputs, targets) as a loader."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class Once:
    """An iterator of batches that is read once, and may be looked at before."""

    def __init__(self, batches: Iterator[Any]):
        self._batches, self._kept = batches, deque[Any]()

    def peek(self, count: int) -> list[Any]:
        """The next `count` batches, or as many as there are; they stay the next ones."""
        while len(self._kept) < count:
            try:
                self._kept.append(next(self._batches))
            except StopIteration:
                break
        return list(self._kept)[:count]

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self._kept:
                yield self._kept.popleft()
                continue
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            yield batch
