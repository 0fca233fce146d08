"""A record: one event of a run as a line, `{"kind": "step", "step": 120, "loss": 0.31, ...}`.

Keys people see: kind (step, epoch), epoch, batch, step, loss, accuracy, train_loss, train_accuracy,
val_loss, val_accuracy, learning_rate, samples_per_second, seconds (of the epoch), total_time_seconds (of
the run so far); others are passed on as they are.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cyxjax.files import append, write_whole

Record = Mapping[str, float | int | str]


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


def step_of(record: Record) -> int:
    """The optimizer step it belongs to."""
    return int(plain(record.get("step", 0)))


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


class Sink:
    """Takes records, one at a time, until it is closed; a sink overrides what it does."""

    def log(self, record: Record) -> None:
        """Keeps `record`."""

    def close(self) -> None:
        """Writes what is still to be written; the sink is not used afterwards."""
