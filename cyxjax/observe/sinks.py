"""Where records go: files of the run folder, TensorBoard, Weights & Biases, trackio, MLflow; or nowhere.

A sink takes a record and must never stop training: each one is wrapped, says once what went wrong, and
is then left out.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cyxjax.observe.records import Record, Sink, Warn, describe
from cyxjax.plugins import named
from cyxjax.run_folder import RunFolder


class NullSink:
    """Keeps nothing: "off" as a value."""

    def log(self, record: Record) -> None: ...
    def close(self) -> None: ...


class KeptOpen:
    """The sink of a run that has something to say after its training, which closes what it was given."""

    def __init__(self) -> None:
        self._sink: Sink = NullSink()

    def over(self, sink: Sink) -> Sink:
        """Takes `sink` over; what is given back passes records on, and closes nothing."""
        self._sink = sink
        return MultiSink([_Open(sink)])

    def log(self, record: Record) -> None:
        self._sink.log(record)

    def close(self) -> None:
        self._sink.close()


class _Open(NullSink):
    def __init__(self, sink: Sink) -> None:
        self.log = sink.log  # type: ignore[method-assign]


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
    With `resume_step` records up to that step are kept and the run goes on; without, files start anew.
    Raises: ConfigError for an unknown name.
    """
    from cyxjax.observe import file_sinks, tracker_sinks
    from cyxjax.observe.background import BackgroundSink

    folder, values = RunFolder(Path(run_dir)), config or {}
    local: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: file_sinks.JsonlSink(folder.metrics, resume_step),
        "csv": lambda: file_sinks.CsvSink(folder.metrics_table, resume_step),
    }
    remote: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: tracker_sinks.TensorBoardSink(folder.tensorboard, resume_step),
        "wandb": lambda: tracker_sinks.WandbSink(folder.root, values, resume_step),
        "trackio": lambda: tracker_sinks.TrackioSink(folder.root, values, resume_step),
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
