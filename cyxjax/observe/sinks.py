"""Where records go: files of the run folder, TensorBoard, Weights & Biases, trackio, MLflow; or nowhere.

A sink takes a record and must never stop training: each one is wrapped, says once what went wrong, and
is then left out.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cyxjax.observe.records import Record, Sink, Warn, copied, describe
from cyxjax.plugins import named
from cyxjax.run_folder import RunFolder

_STOP = object()
_LOOK_S = 0.05  # between two looks at a sink that is being closed


class NullSink:
    """Drops records: no sinks, or another rank."""

    def log(self, record: Record) -> None: ...
    def close(self) -> None: ...


class MultiSink:
    """Hands each record to all of `sinks`."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, record: Record) -> None:
        for sink in self._sinks:
            sink.log(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class GuardedSink:
    """`open()`'s sink, used in this thread; its first error is reported once and disables it."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], warn: Warn) -> None:
        self._name, self._warn = name, warn
        self._sink: Sink = NullSink()
        self._try(lambda: setattr(self, "_sink", open_sink()))

    def log(self, record: Record) -> None:
        self._try(lambda: self._sink.log(record))

    def close(self) -> None:
        self._try(self._sink.close)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as err:  # whatever a sink raises, training goes on
            self._sink = NullSink()
            self._warn(f"WARNING: metrics sink {self._name} failed and is disabled: {describe(err)}")


class BackgroundSink:
    """Opens and feeds `open_sink()`'s sink in a thread of its own; `log` never waits and never raises.

    At most `depth` records wait; more are dropped, with one warning. An error ends the sink, with one
    warning. `close` waits at most `close_s` seconds, and not that long for a sink that has been busy with
    one record for `stuck_s`; the thread is a daemon, so a sink that is stuck does not keep the process.
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
        self._name, self._open, self._warn = name, open_sink, warn
        self._close_s, self._stuck_s = close_s, stuck_s
        self._busy_since: float | None = None  # when the record that is being written was taken
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._depth = depth
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"cyxjax-sink-{name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        if not self._thread.is_alive():  # the sink failed
            return
        if self._queue.qsize() < self._depth:
            self._queue.put(copied(record))  # a copy: the caller may go on using its dict
            return
        self.num_dropped += 1
        if self.num_dropped == 1:
            self._warn(f"WARNING: metrics sink {self._name} is too slow; some records are dropped")

    def close(self) -> None:
        end = time.monotonic() + self._close_s
        self._queue.put(_STOP)
        while self._thread.is_alive() and time.monotonic() < end and not self._is_stuck():
            self._thread.join(_LOOK_S)
        if self._thread.is_alive():
            self._warn(
                f"WARNING: metrics sink {self._name} did not finish in time and is abandoned with "
                f"{self._queue.qsize() - 1} records unwritten"
            )

    def _is_stuck(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._stuck_s

    def _run(self) -> None:
        try:
            sink = self._open()
            while (record := self._queue.get()) is not _STOP:
                self._busy_since = time.monotonic()
                sink.log(record)  # type: ignore[arg-type]  # only dicts and _STOP are put
                self._busy_since = None
            sink.close()
        except Exception as err:  # whatever a sink raises, training goes on
            self._warn(f"WARNING: metrics sink {self._name} failed and is disabled: {describe(err)}")


def warn_on_stderr(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


OURS = ("jsonl", "csv", "tensorboard", "wandb", "trackio", "mlflow")


def check_names(names: Sequence[str]) -> None:
    """Each of `names` is a sink; one's own is imported. Raises: ConfigError for one that is not."""
    for name in names:
        named("sink", name, dict.fromkeys(OURS), unknown=f"sinks: unknown {name!r}.", key="sinks")


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

    `config` is the resolved configuration: its `wandb` section is used, all of it is shown there.
    With `resume_step` records up to that step are kept and the run goes on; without, new files begin.
    Raises: ConfigError for an unknown name.
    """
    from cyxjax.observe import file_sinks, tracker_sinks

    folder, values = RunFolder(Path(run_dir)), config or {}
    local: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: file_sinks.JsonlSink(folder.metrics, resume_step),
        "csv": lambda: file_sinks.CsvSink(folder.metrics_table, resume_step),
    }
    remote: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: tracker_sinks.TensorBoardSink(folder.tensorboard, resume_step),
        "wandb": lambda: tracker_sinks.wandb_sink(folder.root, values, resume_step),
        "trackio": lambda: tracker_sinks.trackio_sink(folder.root, values, resume_step),
        "mlflow": lambda: tracker_sinks.MlflowSink(folder.root, values, resume_step),
    }
    check_names(names)
    for name in names:
        if name not in OURS:
            local[name] = partial(named("sink", name, {}, key="sinks"), folder.root)
    if not is_master or not names:
        return NullSink()
    return MultiSink(
        [
            GuardedSink(name, local[name], warn)
            if name in local
            else BackgroundSink(name, remote[name], warn)
            for name in names
        ]
    )
