"""A record: one event of a run as a line, `{"kind": "step", "step": 120, "loss": 0.31, ...}`.

Keys people see: kind (step, epoch), epoch, batch, step, loss, accuracy, train_loss, train_accuracy,
val_loss, val_accuracy, learning_rate, samples_per_second, seconds (of the epoch), total_time_seconds (of
the run so far); others are passed on as they are. A value may be a picture, a text or a histogram, which
trackers show and files leave out.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from cyxjax.files import append, write_whole

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Image:
    """A picture: uint8 (height, width, 3), and a line of text."""

    pixels: np.ndarray
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """A passage of text."""

    text: str


@dataclass(frozen=True, eq=False)
class Histogram:
    """counts (N,) of values between edges (N + 1,)."""

    counts: np.ndarray
    edges: np.ndarray


Media = Image | Text | Histogram


def histogram(values: np.ndarray, bins: int = 32) -> Histogram:
    """Of the values that are finite numbers."""
    known = np.asarray(values, np.float64).reshape(-1)
    counts, edges = np.histogram(known[np.isfinite(known)], bins)
    return Histogram(counts, edges)


def pictures(values: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, 3) of (N, H, W, 1 or 3): the least of all values black, the largest white.

    Of more than 96 pixels a side every second, third, ... is taken.
    """
    every = -(-max(values.shape[1:3]) // 96)
    floats = np.nan_to_num(np.asarray(values[:, ::every, ::every], np.float32))
    low, high = (float(edge(floats)) for edge in (np.min, np.max))
    scaled = np.rint(255 * (floats - low) / max(high - low, 1e-12)).astype(np.uint8)
    return np.repeat(scaled, 3, -1) if scaled.shape[-1] == 1 else scaled


def png(pixels: np.ndarray) -> bytes:
    """The file of uint8 (H, W, 3). Source: PNG specification, sections 9 (filter 0) and 11.2."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def is_png(raw: bytes) -> bool:
    """Whether `raw` begins as such a file does."""
    return raw.startswith(_SIGNATURE + struct.pack(">I", 13) + b"IHDR")


Record = Mapping[str, float | int | str | Media]


def plain(value: object) -> float | int | str:
    """`value` as JSON can hold it: a scalar array as its number, NaN and infinities as text."""
    if isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else str(number)


def plain_tree(value: Any) -> Any:
    """Dicts and lists of any depth, as JSON can hold them."""
    if isinstance(value, dict):
        return {str(name): plain_tree(part) for name, part in value.items()}
    if not isinstance(value, list | tuple):
        return None if value is None else plain(value)
    # Each save holds the whole history: thousands of numbers must not be thousands of calls.
    if set(map(type, value)) <= {int, float} and all(map(math.isfinite, value)):
        return list(value)
    return [plain_tree(part) for part in value]


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
def warn_if_unwritten(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Runs a block that writes `path`, which training can do without: on a full disk it warns and goes on."""
    try:
        yield
    except OSError as error:
        warn(f"WARNING: {path} was not written: {error.strerror or error}. HINT: check the disk.")


def once(warn: Callable[[str], None]) -> Callable[[str], None]:
    """`warn` for the first line only."""
    lines = [warn]
    return lambda text: lines.pop()(text) if lines else None


def add_line(path: Path, value: Mapping[str, object], warn: Callable[[str], None]) -> None:
    """Appends `value` to the file at `path` as a line of JSON; warns where it cannot be written."""
    with warn_if_unwritten(path, warn):
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, (json.dumps(value, allow_nan=False) + "\n").encode(), durable=False)


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
