"""One pass over a loader, and the place in it: as the loader itself says it, in JSON.

Iterators of grain have `get_state` and `set_state`; streams of Hugging Face and torchdata's loaders
`state_dict` and `load_state_dict`. What has neither is passed over again by who goes on.
"""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cyxjax.data.labels import WatchedLoader
from cyxjax.data.sources import as_batches
from cyxjax.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))
_TAG = "__of__"


class Reader:
    """One pass over `loader`, from `place` on; raw batches, or with `pairs` (inputs, targets) arrays."""

    def __init__(self, loader: Any, place: Any = None):
        self._loader = loader
        inner = loader.loader if isinstance(loader, WatchedLoader) else loader
        self._iterator, self._state = _opened(inner, place)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Batches as arrays, their labels looked at where the loader is watched."""
        watched = isinstance(self._loader, WatchedLoader)
        return self._loader.watch(self._iterator) if watched else as_batches(self._iterator)

    def place(self) -> Any:
        """Where the next batch will be read, as JSON; None where the loader does not say it."""
        return None if self._state is None else packed(self._state())


def _opened(loader: Any, place: Any) -> tuple[Iterator[Any], Callable[[], Any] | None]:
    try:
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not _forgets(loader):
            if place is not None:
                loader.load_state_dict(unpacked(place))
            return iter(loader), loader.state_dict
        iterator = iter(loader)
        for get, put in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
            if hasattr(iterator, get) and hasattr(iterator, put):
                if place is not None:
                    getattr(iterator, put)(unpacked(place))
                return iterator, getattr(iterator, get)
    except Exception as err:
        if place is None:
            raise
        raise CheckpointError(
            f"{type(loader).__name__} does not take the place that the checkpoint kept of it "
            f"({type(err).__name__}: {err}). HINT: give fit the loader of before, or resume: never."
        ) from err
    if place is not None:
        raise CheckpointError(
            f"the checkpoint kept a place in a stream, and {type(loader).__name__} takes none. "
            "HINT: give fit the loader of before, or resume: never."
        )
    return iterator, None


def _forgets(loader: Any) -> bool:
    """A shuffle buffer of Hugging Face's is not in its state: what lay in it would never be seen."""
    part, names = getattr(loader, "_ex_iterable", None), []
    while part is not None:
        names.append(type(part).__name__)
        part = getattr(part, "ex_iterable", None)
    shuffling = getattr(loader, "_shuffling", None) is not None
    return shuffling or any("BufferShuffled" in name for name in names)


def packed(value: Any) -> Any:
    """`value` as JSON holds it; None if it cannot be. Never a pickle: a checkpoint runs no code."""
    try:
        return _packed(value)
    except TypeError:
        return None


def _packed(value: Any) -> Any:
    if isinstance(value, np.generic):
        return _packed(value.item())
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_TAG: value.dtype.str, "shape": list(value.shape), "data": _packed(value.tobytes())["data"]}
    if isinstance(value, list):
        return [_packed(one) for one in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "data": [_packed(one) for one in value]}
    if isinstance(value, dict):
        return {_TAG: "dict", "data": [[_packed(k), _packed(v)] for k, v in value.items()]}
    raise TypeError(type(value).__name__)


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind, data = value[_TAG], value["data"]
    if kind == "tuple":
        return tuple(unpacked(one) for one in data)
    if kind == "dict":
        return {unpacked(k): unpacked(v) for k, v in data}
    raw = base64.b64decode(data)
    return raw if kind == "bytes" else np.frombuffer(raw, kind).reshape(value["shape"]).copy()
