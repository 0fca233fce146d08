"""Tables and streams of Hugging Face's `datasets`, recognized by what they have: it is not imported."""

import copy
from collections.abc import Iterator
from typing import Any


def in_numpy(table: Any) -> Any:
    """A Hugging Face dataset that gives numpy columns: those that its format selects. A transform is kept."""
    own = getattr(table, "format", {})
    if own.get("type") == "custom":
        return table
    selected = {name: own[name] for name in ("columns", "output_all_columns") if name in own}
    return table.with_format("numpy", **selected)


def has_buffer(loader: Any) -> bool:
    """Whether a Hugging Face stream has a shuffle buffer, whose samples its state does not hold."""
    is_shuffled = getattr(loader, "_shuffling", None) is not None
    source = getattr(loader, "_ex_iterable", None)
    return is_shuffled or any("BufferShuffled" in type(part).__name__ for part in _sources(source))


def _sources(part: Any) -> Iterator[Any]:
    """A source of a Hugging Face stream, and all sources that it reads."""
    if part is not None:
        yield part
        for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())):
            yield from _sources(inner)


def is_stream(data: Any) -> bool:
    """Whether `data` is a stream of Hugging Face's datasets."""
    return hasattr(data, "_ex_iterable") and hasattr(data, "with_format")


def with_own_position(data: Any) -> Any:
    """A copy of a Hugging Face stream: the streams of one source share, and would move, its position. Other
    data unchanged.
    """
    if not is_stream(data):
        return data
    own = object.__new__(type(data))  # `copy` makes one that shares its attributes with `data`
    own.__dict__ = data.__dict__ | {"_ex_iterable": _own_source(data._ex_iterable)}
    return own


def _own_source(part: Any) -> Any:
    """A copy of a source of a Hugging Face stream, and of those it reads, which each hold their position."""
    own = copy.copy(part)
    if hasattr(part, "ex_iterable"):
        own.ex_iterable = _own_source(part.ex_iterable)
    if hasattr(part, "ex_iterables"):
        own.ex_iterables = [_own_source(one) for one in part.ex_iterables]
    return own
