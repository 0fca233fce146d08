"""Values that are set while a block runs, for traced code that cannot get them as arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """`variable` is `value` inside the block, in this thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
