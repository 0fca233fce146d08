"""A record: numbers of a run at a step, `{"step": 120, "loss": 0.31, ...}`.

Displayed keys: epoch, batch, step, loss, accuracy, train_loss, train_accuracy, val_loss, val_accuracy,
learning_rate, samples_per_second, seconds (of the epoch); the report also uses total_time_seconds (of the
run so far). Other keys are passed on unchanged. A record of goodput, test results or a rollback has a `kind`.
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
    """`value` as JSON can store it: a scalar array as a number, NaN and infinities as text."""
    if isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else str(number)


def plain_tree(value: Any) -> Any:
    """Nested dicts and lists, as JSON can store them."""
    if isinstance(value, dict):
        return {str(name): plain_tree(part) for name, part in value.items()}
    if not isinstance(value, list | tuple):
        return None if value is None else plain(value)
    # Fast path: each save contains the whole history, with thousands of numbers.
    if set(map(type, value)) <= {int, float} and all(map(math.isfinite, value)):
        return list(value)
    return [plain_tree(part) for part in value]


def step_of(record: Record) -> int:
    """The optimizer step of `record`."""
    return int(plain(record.get("step", 0)))


@contextmanager
def warn_if_unwritten(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Runs a block that writes the optional file `path`; warns if that fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        warn(f"WARNING: {path} was not written: {error.strerror or error}. HINT: check the disk.")


def once(warn: Callable[[str], None]) -> Callable[[str], None]:
    """`warn` for the first line only."""
    lines = [warn]
    return lambda text: lines.pop()(text) if lines else None


def add_line(path: Path, value: Mapping[str, object], warn: Callable[[str], None]) -> None:
    """Appends `value` to the file at `path` as a line of JSON; warns if it cannot be written."""
    with warn_if_unwritten(path, warn):
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, (json.dumps(value, allow_nan=False) + "\n").encode(), durable=False)


def write_atomic(path: str | Path, text: str) -> None:
    """Replaces the file at `path` by `text` atomically (see `files.write_whole`); creates missing folders."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


Warn = Callable[[str], None]


class Sink:
    """Receives records one by one until it is closed; subclasses override the methods that they need."""

    def log(self, record: Record) -> None:
        """Stores `record`."""

    def close(self) -> None:
        """Writes everything that is still pending; the sink is not used afterwards."""
