"""A record: one line of what happened, `{"kind": "step", "step": 120, "loss": 0.31, ...}`.

Keys people see: kind (step, epoch), epoch, batch, step, loss, accuracy, train_loss, train_accuracy,
val_loss, val_accuracy, learning_rate, samples_per_second, seconds (of the epoch), total_time_seconds (of
the run so far); others are passed on as they are. A value
may be a picture, a text or a histogram (media.py), which trackers show and files leave out.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeGuard

from cyxjax.files import write_whole
from cyxjax.observe.media import Histogram, Image, Media, Text

Record = Mapping[str, float | int | str | Media]


def plain(value: object) -> float | int | str:
    """`value` as JSON can hold it: a scalar array as its number, NaN and infinities as text."""
    if isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else str(number)


def plain_record(record: Mapping[str, object]) -> dict[str, float | int | str]:
    """`record` with every value made plain, without its media."""
    return {key: plain(value) for key, value in record.items() if not is_media(value)}


def copied(record: Record) -> Record:
    """`record` as it is now, with every number made plain."""
    return {key: value if is_media(value) else plain(value) for key, value in record.items()}


def step_of(record: Record) -> int:
    """The optimizer step it belongs to."""
    found = plain(record.get("step", 0))
    return int(found)


def is_media(value: object) -> TypeGuard[Media]:
    return isinstance(value, Image | Text | Histogram)


@contextmanager
def or_told(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Runs a block that writes `path`, which training can do without: on a full disk it warns and goes on."""
    try:
        yield
    except OSError as error:
        warn(f"WARNING: {path} was not written: {error.strerror or error}. HINT: check the disk.")


def write_atomic(path: str | Path, text: str) -> None:
    """Replaces the file at `path` by `text` in one step (see `files.write_whole`); makes missing folders."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


Warn = Callable[[str], None]


class Sink(Protocol):
    """Takes records, one at a time, until it is closed."""

    def log(self, record: Record) -> None:
        """Keeps `record`."""

    def close(self) -> None:
        """Writes what is still to be written; the sink is not used afterwards."""


def describe(err: BaseException) -> str:
    """Type and first line of an error, for one-line warnings."""
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0]}" if lines else type(err).__name__
