"""A stream of single samples as a loader: batched here, and dealt out to the ranks."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from cyxjax.data.columns import Columns, leaves, split
from cyxjax.data.items import stack
from cyxjax.data.streams.place import Reader
from cyxjax.errors import DataError


class Rows:
    """Samples one after another: anything that begins anew each time it is iterated.

    `inputs` and `targets` name columns of records. `shared`: every rank reads the same samples, in the same
    order, and takes its share of each step, so that a run goes on at any number of processes; else each
    rank reads its own.
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
        names = inputs if inputs is None or isinstance(inputs, str) else tuple(inputs)
        self.columns = Columns(names, targets)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def as_rows(data: Any) -> Rows | None:
    """`data` as single samples where that is what it gives: `Rows`, torch's and Hugging Face's streams."""
    _let_grain_work()
    if isinstance(data, Rows):
        return data
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return Rows(data)
    if hasattr(data, "_ex_iterable") and hasattr(data, "with_format"):
        return Rows(data.with_format("numpy"), shared=getattr(data, "_distributed", None) is None)
    return None


def _let_grain_work() -> None:
    """grain's worker processes ask absl for flags, which only a main of absl's parses (0.2.18)."""
    flags = sys.modules.get("absl.flags")
    if "grain" in sys.modules and flags is not None and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class RowBatches:
    """`rows` in batches of `batch_size` samples of this process; its iterators know their place."""

    def __init__(self, rows: Rows, batch_size: int, rank: int, world_size: int, drop_last: bool = False):
        self.rows, self.batch_size, self.drop_last = rows, batch_size, drop_last
        self.deal = (rank, world_size) if rows.shared else (0, 1)

    def __iter__(self) -> "_Batches":
        return _Batches(self)

    def set_epoch(self, epoch: int) -> None:
        """Handed on to the stream, where it can be told."""
        tell = getattr(self.rows.source, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def first_digest(self) -> str:
        """Of the first sample: equal on all ranks where they read one stream."""
        for row in self.rows:
            parts = [
                np.ascontiguousarray(np.asarray(leaf)) for _, leaf in leaves(split(row, self.rows.columns))
            ]
            return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
        return ""


def _kept(row: Any) -> Any:
    """`row`, whose arrays its source may fill anew with the next sample."""
    if isinstance(row, np.ndarray):
        return row.copy()
    if isinstance(row, dict):
        return {name: _kept(part) for name, part in row.items()}
    if isinstance(row, tuple) and hasattr(row, "_fields"):
        return type(row)(*map(_kept, row))
    return type(row)(map(_kept, row)) if type(row) in (list, tuple) else row


class _Batches:
    """One pass. A stream that knows no place is counted in samples, and passed over by who goes on."""

    def __init__(self, of: RowBatches):
        self._of, self._given = of, 0
        self._reader = Reader(of.rows.source)
        self._source = iter(self._reader)

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> tuple[Any, Any]:
        rank, ranks = self._of.deal
        wanted = self._of.batch_size * ranks
        count, mine = 0, []
        for row in islice(self._source, wanted):
            if count % ranks == rank:
                mine.append(_kept(row))
            count += 1
        if not count or (self._of.drop_last and count < wanted):
            raise StopIteration
        numbers = range(self._given + rank, self._given + count, ranks)
        self._given += count
        if not mine:  # the last samples of the stream are fewer than the ranks
            raise StopIteration
        return _stacked(mine, numbers, self._of.rows.columns)

    def get_state(self) -> Any:
        """Where the next batch begins."""
        return {"given": self._given, "place": self._reader.place()}

    def set_state(self, state: Any) -> None:
        """Goes on where `get_state` said, at any number of ranks that share the stream."""
        self._given, place = state["given"], state["place"]
        self._reader = Reader(self._of.rows.source, place)
        self._source = iter(self._reader)
        if place is None and len(list(islice(self._source, self._given))) < self._given:
            raise DataError("the stream is shorter than it was. HINT: check the files it reads.")


def _stacked(items: list[Any], numbers: Sequence[int], columns: Columns) -> tuple[Any, Any]:
    pairs = [split(tuple(item) if isinstance(item, list) else item, columns) for item in items]
    inputs = stack([x for x, _ in pairs], numbers)
    same = all(y is x for x, y in pairs)
    return inputs, inputs if same else stack([y for _, y in pairs], numbers)
