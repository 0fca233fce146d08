"""Streams: data that is read sequentially, without an index, and the position in it.

Iterators of grain have `get_state` and `set_state`; Hugging Face streams and torchdata's loaders have
`state_dict` and `load_state_dict`: the position is what these methods return, as JSON. A loader without
either pair is read again up to the position at which a run continues."""

import base64
import copy
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from cyxjax.data import hugging_face
from cyxjax.data.columns import Columns, leaves, own_arrays, split, stack_rows
from cyxjax.data.loader import part_with_set_epoch, set_epoch_of
from cyxjax.errors import CheckpointError, DataError


class Batches:
    """Wraps batches (inputs, targets) as a loader: a list, or any object that starts over when iterated."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class Once:
    """An iterator of batches that is read once."""

    def __init__(self, batches: Iterator[Any]):
        self._batches, self._given = batches, 0

    def __iter__(self) -> Iterator[Any]:
        """The batches. Raises: DataError the second time, since an iterator cannot start over."""
        if self._given:
            raise DataError(
                f"an iterator of batches gave {self._given} batches and cannot be read again from the "
                "beginning. HINT: pass an object whose __iter__ starts from the beginning, or set max_steps."
            )
        for batch in self._batches:
            self._given += 1
            yield batch


_PLAIN = (bool, int, float, str, type(None))
_TAG = "__of__"


class Reader:
    """One pass over `loader` from `place` on: `raw` has its batches."""

    def __init__(self, loader: Any, place: Any = None):
        self.raw, self._state = _opened(loader, place)

    def own(self) -> range | None:
        """The places of this rank's samples in the last batch, which ranks share; None if it is its own."""
        return self.raw.own if isinstance(self.raw, _RowPass) else None

    def place(self) -> Any:
        """The position of the next batch, as JSON; None if the loader does not provide one."""
        return None if self._state is None else packed(self._state())


def _has_state(loader: Any) -> bool:
    """Whether a loader itself, not the iterator of a pass, reports and restores its position."""
    has_both = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return has_both and not hugging_face.has_buffer(loader)


def end_place(loader: Any) -> Any:
    """The position of a loader that was read to its end, as JSON; None if its next pass starts over, as that
    of one with `set_epoch`."""
    if isinstance(loader, RowBatches):
        place = end_place(loader.rows.source)
        return None if place is None else packed({"given": 0, "place": place})
    keeps = _has_state(loader) and part_with_set_epoch(loader) is None
    return packed(loader.state_dict()) if keeps else None


def _opened(loader: Any, place: Any) -> tuple[Iterator[Any], Callable[[], Any] | None]:
    if _has_state(loader):
        if place is not None:
            loader.load_state_dict(unpacked(place))
        return iter(loader), loader.state_dict
    iterator = iter(loader)
    for get, put in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(iterator, get) and hasattr(iterator, put):
            if place is not None:
                getattr(iterator, put)(unpacked(place))
            return iterator, getattr(iterator, get)
    if place is not None:
        raise CheckpointError(
            f"the checkpoint holds a position in a stream, and {type(loader).__name__} cannot restore one. "
            "HINT: pass the same loader to fit, or resume: never."
        )
    return iterator, None


def packed(value: Any) -> Any:
    """`value` as JSON; None if that is not possible. Never a pickle, so that a checkpoint cannot run code."""
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


class Rows:
    """A stream of single samples: any object that starts over each time it is iterated.

    `inputs` and `targets` name columns of records. `shared`: every rank reads the same samples, in the same
    order, and takes its share of each step, so that a run can continue with any number of processes; else
    each rank reads its own samples.
    """

    def __init__(
        self,
        source: Iterable[Any],
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        *,
        shared: bool = True,
    ):
        self.source, self.shared = source, shared
        self.columns = Columns.of(inputs, targets)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def as_rows(data: Any) -> Rows | None:
    """`data` as `Rows` if it yields single samples: `Rows`, torch's and Hugging Face's streams; else None.

    Raises: DataError for `Rows` of an iterator: the first samples are read for the shapes, then each epoch
        reads the stream again.
    """
    _let_grain_work()
    if isinstance(data, Rows):
        if isinstance(data.source, Iterator):
            raise DataError(
                f"Rows of {type(data.source).__name__}, which is an iterator; expected a stream that starts "
                "over. HINT: pass an object whose __iter__ makes a new iterator."
            )
        own = copy.copy(data)
        own.source = hugging_face.with_own_position(data.source)
        return own
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return Rows(data)
    if hugging_face.is_stream(data):
        stream = hugging_face.with_own_position(data).with_format("numpy")
        return Rows(stream, shared=getattr(data, "_distributed", None) is None)
    return None


def _let_grain_work() -> None:
    """Marks absl's flags as parsed: grain's workers read them (0.2.18), but only absl's main parses them."""
    flags = sys.modules.get("absl.flags")
    if "grain" in sys.modules and flags is not None and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class RowBatches:
    """`rows` in batches of `batch_size` samples of this process; iterators can be resumed."""

    def __init__(self, rows: Rows, batch_size: int, rank: int, world_size: int, drop_last: bool = False):
        self.rows, self.batch_size, self.drop_last = rows, batch_size, drop_last
        self.deal = (rank, world_size) if rows.shared else (0, 1)
        self.first_row: Any = None  # of the first pass that began at the beginning

    def __iter__(self) -> "_RowPass":
        return _RowPass(self)

    def set_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of the stream, if it has one."""
        set_epoch_of(self.rows.source, epoch)

    def first_digest(self) -> str:
        """Digest of the first sample that was read: equal on all ranks if they read the same stream."""
        row = leaves(split(self.first_row, self.rows.columns))
        return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for _, leaf in row)).hexdigest()


class _RowPass:
    """One pass. Without a state of the stream, its position is a number of samples to skip.

    Ranks that share the stream get equally many rows: one that has no sample for its last row gets another
    rank's.
    own: the places of this rank's samples among those that all ranks read for the last batch; `own.stop` is
    their number. None if the stream is not shared.
    """

    own: range | None = None

    def __init__(self, of: RowBatches):
        self._of = of
        self.set_state({"given": 0, "place": None})

    def __iter__(self) -> "_RowPass":
        return self

    def __next__(self) -> tuple[Any, Any]:
        rank, ranks = self._of.deal
        wanted = self._of.batch_size * ranks
        count, mine = 0, []
        for row in islice(self._source, wanted):
            if self._of.first_row is None and self._given == 0:
                self._of.first_row = own_arrays(row)
            if count % ranks == rank:
                mine.append(own_arrays(row))
            count += 1
        if not count or (self._of.drop_last and count < wanted):
            raise StopIteration
        numbers = range(self._given + rank, self._given + wanted, ranks)
        self._given += count
        if self._of.rows.shared:
            self.own = range(rank, count, ranks)
        if len(mine) * ranks < count:  # the stream ended at a sample of another rank
            mine.append(own_arrays(row))
        return stack_rows(mine, self._of.rows.columns, numbers)

    def get_state(self) -> Any:
        """Where the next batch begins."""
        return {"given": self._given, "place": self._reader.place()}

    def set_state(self, state: Any) -> None:
        """Continues at the position of `get_state`, at any number of ranks that share the stream."""
        self._given, place = state["given"], state["place"]
        self._reader = Reader(self._of.rows.source, place)
        self._source = self._reader.raw
        if place is None:
            deque(islice(self._source, self._given), maxlen=0)
