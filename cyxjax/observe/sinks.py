"""Sinks for records: files in the run folder, TensorBoard, Weights & Biases, trackio and MLflow.

A sink must never stop training: each one is wrapped, and after its first error a warning is printed and it is
disabled, unless the disk is full.
"""

import csv
import errno
import io
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cyxjax.files import append, read_json_lines, read_plain
from cyxjax.observe import tracker_sinks
from cyxjax.observe.records import Record, Sink, Warn, once, plain_tree, write_atomic
from cyxjax.plugins import named
from cyxjax.redaction import describe
from cyxjax.run_folder import RunFolder

_STOP = object()
_DISK_IS_FULL = errno.ENOSPC, errno.EDQUOT
_LOOK_S = 0.05  # between two checks of a sink that is being closed


class NullSink(Sink):
    """Drops records: for no sinks, and for other ranks."""


class MultiSink(Sink):
    """Passes each record to all of `sinks`."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, record: Record) -> None:
        for sink in self._sinks:
            sink.log(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class JsonlSink(Sink):
    """One JSON object per line, written at once, so that a crash loses nothing that was logged.

    With `resume_step` the records up to that step are kept and later ones are dropped (they will be
    written again); without it, or at step 0, an existing file is renamed to `*.old`.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        kept = _kept(partial(read_json_lines, path), Path(path), resume_step)
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._path = path

    def log(self, record: Record) -> None:
        line = json.dumps(plain_tree(record), allow_nan=False) + "\n"
        append(self._path, line.encode(), durable=False)


class CsvSink(Sink):
    """A table with one column per key; a new key adds a column. Resumes like `JsonlSink`."""

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self._columns: dict[str, None] = {}
        self._write(_kept(self._rows, self.path, resume_step))

    def log(self, record: Record) -> None:
        row = plain_tree(record)
        if row.keys() <= self._columns.keys():
            line = io.StringIO(newline="")
            csv.DictWriter(line, self._columns).writerow(row)
            append(self.path, line.getvalue().encode(), durable=False)
        else:
            self._write([*self._rows(), row])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Writes the whole table, with a column for each key of `rows`."""
        self._columns |= dict.fromkeys(key for row in rows for key in row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        if self._columns:
            writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path, text.getvalue())

    def _rows(self) -> list[dict[str, Any]]:
        whole = read_plain(self.path).decode(errors="replace").rpartition("\n")[0]  # without a row cut short
        rows = csv.DictReader(io.StringIO(whole, newline=""))
        return [{k: v for k, v in row.items() if k and v not in ("", None)} for row in rows]


def _kept(
    read: Callable[[], Iterable[dict[str, Any]]], path: Path, resume_step: int | None
) -> list[dict[str, Any]]:
    """The records to keep; a file of another run is renamed, and not read."""
    if resume_step and path.exists():
        return [record for record in read() if not _step_of(record) > resume_step]
    if path.exists() and path.stat().st_size:
        path.replace(path.with_name(path.name + ".old"))
    return []


def _step_of(record: dict[str, Any]) -> float:
    """The step of `record`; NaN if it has none."""
    try:
        return float(record.get("step", 0))
    except (TypeError, ValueError):
        return math.nan


class GuardedSink(Sink):
    """The sink from `open_sink()`, used in this thread; its first error is reported and disables it.

    Records that the disk refuses, because it is full, wait for the next record or the end.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], warn: Warn) -> None:
        self._name, self._warn, self._warn_once = name, warn, once(warn)
        self._waiting: list[Record] = []
        self._sink: Sink = NullSink()
        self._try(lambda: setattr(self, "_sink", open_sink()))

    def log(self, record: Record) -> None:
        self._waiting.append(dict(record))
        self._try(self._write)

    def close(self) -> None:
        self._try(self._write)
        if self._waiting:
            self._warn(f"WARNING: metrics sink {self._name} lost the last {len(self._waiting)} records")
        self._try(self._sink.close)

    def _write(self) -> None:
        try:
            while self._waiting:
                self._sink.log(self._waiting[0])
                del self._waiting[0]
        except OSError as err:
            if err.errno not in _DISK_IS_FULL:
                raise
            self._warn_once(
                f"WARNING: metrics sink {self._name} cannot write: {describe(err)}. Its records wait for a "
                "later one."
            )

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as err:  # training continues after any error of a sink
            self._sink, self._waiting = NullSink(), []
            self._warn(f"WARNING: metrics sink {self._name} failed and is disabled: {describe(err)}")


class BackgroundSink(Sink):
    """Opens and feeds the sink from `open_sink()` in its own thread; `log` never waits and never raises.

    At most `depth` records wait; more are dropped, with one warning. `close` waits at most `close_s` seconds,
    or less for a sink that has been busy with one record for `stuck_s`; the thread is a daemon, so that a
    stuck sink does not keep the process alive.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        warn: Warn,
        *,
        depth: int = 1024,
        close_s: float = 30.0,
        stuck_s: float = 5.0,
    ) -> None:
        self._name, self._open, self._warn, self._warn_once = name, open_sink, warn, once(warn)
        self._depth, self._close_s, self._stuck_s = depth, close_s, stuck_s
        self._stuck_at = math.inf  # when the current record will have taken too long
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cyxjax-sink-{name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        if self._queue.qsize() < self._depth:
            self._queue.put(plain_tree(record))  # a copy: the caller may reuse its dict
        else:
            self._warn_once(f"WARNING: metrics sink {self._name} is too slow; some records are dropped")

    def close(self) -> None:
        end = time.monotonic() + self._close_s
        self._queue.put(_STOP)
        while self._thread.is_alive() and time.monotonic() < min(end, self._stuck_at):
            self._thread.join(_LOOK_S)
        if self._thread.is_alive():
            self._warn(
                f"WARNING: metrics sink {self._name} did not finish in time and is abandoned with "
                f"{max(self._queue.qsize() - 1, 0)} records unwritten"
            )

    def _run(self) -> None:
        sink = GuardedSink(self._name, self._open, self._warn)
        while (record := self._queue.get()) is not _STOP:
            self._stuck_at = time.monotonic() + self._stuck_s
            sink.log(record)
            self._stuck_at = math.inf
        sink.close()


def warn_on_stderr(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


_OURS: dict[str, Callable[[RunFolder, Mapping[str, Any], int | None], Sink]] = {
    "jsonl": lambda folder, values, step: JsonlSink(folder.metrics, step),
    "csv": lambda folder, values, step: CsvSink(folder.metrics_table, step),
    "tensorboard": lambda folder, values, step: tracker_sinks.TensorBoardSink(folder.tensorboard, step),
    "wandb": lambda folder, values, step: tracker_sinks.wandb_sink(folder.root, values, step),
    "trackio": lambda folder, values, step: tracker_sinks.trackio_sink(folder.root, values, step),
    "mlflow": lambda folder, values, step: tracker_sinks.MlflowSink(folder.root, values, step),
}


def sinks_named(names: Sequence[str]) -> dict[str, Callable[..., Sink]]:
    """What opens each sink, by its name; `module:attribute` is imported. Raises: ConfigError for others."""
    return {
        name: named("sink", name, _OURS, unknown=f"sinks: unknown {name!r}.", key="sinks") for name in names
    }


def build_sinks(
    names: Sequence[str],
    run_dir: str | Path,
    is_master: bool,
    config: Mapping[str, Any] | None = None,
    *,
    resume_step: int | None = None,
    warn: Warn = warn_on_stderr,
) -> Sink:
    """One sink for all of `names`: ours, or `module:attribute`, which is called with the run folder's path;
    `NullSink()` on other ranks.

    `config` is the resolved configuration: its `wandb` section is used, and trackers receive all of it.
    With `resume_step` records up to that step are kept and the run continues; without, or at step 0, a new
    one begins.
    Raises: ConfigError for an unknown name.
    """
    openers = sinks_named(names)
    if not is_master or not names:
        return NullSink()
    folder = RunFolder(Path(run_dir))
    sinks: list[Sink] = []
    for name, open_sink in openers.items():
        given = (folder, config or {}, resume_step) if name in _OURS else (folder.root,)
        # Files and a sink of the user get every record; a tracker may lose some, but training never waits.
        is_tracker = name in _OURS and name not in ("jsonl", "csv")
        kind = BackgroundSink if is_tracker else GuardedSink
        sinks.append(kind(name, partial(open_sink, *given), warn))
    return MultiSink(sinks)
