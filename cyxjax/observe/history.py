"""The history of a training run: one value per epoch for each curve, and totals."""

import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter

from cyxjax.errors import DataError
from cyxjax.files import read_plain, readable
from cyxjax.observe.records import plain_tree, write_atomic

T = TypeVar("T")
_MOST_ROWS = 12  # shown in a notebook


def _curve(values: list[Any]) -> list[Any]:
    """A list of numbers, or of lists of them; text such as "nan" becomes a float again; None stays."""
    return [
        _curve(entry) if isinstance(entry, list) else entry if entry is None else float(entry)
        for entry in values
    ]


@dataclass
class DistributedTrainingHistory:
    """Curves with one entry per epoch (val_* one per evaluation) and totals of the run.

    Steps are those of the optimizer, over all resumes.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    train_losses: list[float] = field(default_factory=list)
    train_accuracies: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    val_accuracies: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)  # at the end of each epoch
    grad_norms: list[float] = field(default_factory=list)  # of mean gradients before clipping; step mean
    grad_norm_epochs: list[int] = field(default_factory=list)  # epoch number of each entry of grad_norms
    epochs: list[int] = field(default_factory=list)  # epoch number of each entry of train_losses
    val_epochs: list[int] = field(default_factory=list)  # epoch number of each entry of val_losses
    steps: list[int] = field(default_factory=list)  # number of steps at the end of each entry of epochs
    val_steps: list[int] = field(default_factory=list)  # number of steps at each entry of val_losses
    metrics: dict[str, Annotated[list[Any], AfterValidator(_curve)]] = field(default_factory=dict)
    """Metrics of the user: train_top2, val_top2, ...; a confusion matrix as a list of rows. None: an epoch
    before the metric was added. Shorter than `epochs`: it was removed."""
    total_time_seconds: float = 0.0
    samples_per_second: float = 0.0  # real training samples per second of total_time_seconds
    effective_batch_size: int = 0  # batch_size * num_replicas * gradient_accumulation_steps
    world_size: int = 1  # processes
    num_replicas: int = 1  # devices that each processed a part of every step
    num_steps: int = 0  # optimizer steps taken, over all resumes
    skipped_steps: int = 0  # steps skipped because a gradient was not finite
    rollback_epochs: list[int] = field(default_factory=list)  # where each rollback continued in the data:
    rollback_samples: list[int] = field(default_factory=list)  # after this many samples of that epoch,
    rollback_batches: list[int] = field(default_factory=list)  # this many batches,
    rollback_steps: list[int] = field(default_factory=list)  # number of steps that it undid
    goodput: float = 0.0  # fraction of the time, restarts included, spent in steps that count (experiments)
    flops_per_sample: float = 0.0  # forward, backward and update; 0.0: not known (experiments)
    flops_per_second: float = 0.0  # over all replicas, in steps that count and waiting for data
    mfu: float = 0.0  # flops_per_second as a fraction of the devices' peak; 0.0: not known
    peak_memory_bytes: int = 0  # maximum on a device of rank 0; on CPU, of rank 0's process
    commit: str = ""  # git commit of the working folder, and whether it had changes; "": none
    # Name of the StopReason that ended the run; "" if it ended after `epochs`.
    stopped_by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite as text ("nan", "inf")."""
        return {f.name: plain_tree(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; missing keys get their defaults.

        Raises: DataError for an unknown key or a value of a wrong type.
        """
        with readable("history", DataError, "was it written by another version, or edited by hand?"):
            return TypeAdapter(cls).validate_python(values)

    def save(self, path: str | Path) -> None:
        """Writes JSON to `path` atomically; a crash leaves the old file or the new one."""
        write_atomic(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The history that `save` wrote. Raises: DataError that names the file if it is not a history."""
        with readable(path, DataError, "give the history.json of a run folder"):
            return TypeAdapter(cls).validate_json(read_plain(path))

    def reopen(self, epoch: int) -> None:
        """Removes the entry of an epoch that was cut short and now continues: it gets a complete one."""
        if self.epochs[-1:] != [epoch]:
            return
        self.epochs.pop()
        of_epochs = [values for epochs, values in self.columns().values() if epochs is self.epochs]
        for values in (self.steps, *of_epochs):
            del values[len(self.epochs) :]
        if self.grad_norm_epochs[-1:] == [epoch]:
            self.grad_norm_epochs.pop()
            self.grad_norms.pop()

    def columns(self) -> dict[str, tuple[list[int], list[Any]]]:
        """(epoch of each value, values) of each curve, by its name in records and as `monitor`."""
        by_train, by_val = self.epochs, self.val_epochs
        known = {
            "train_loss": (by_train, self.train_losses),
            "train_accuracy": (by_train, self.train_accuracies),
            "learning_rate": (by_train, self.learning_rates),
            "grad_norm": (self.grad_norm_epochs, self.grad_norms),
            "val_loss": (by_val, self.val_losses),
            "val_accuracy": (by_val, self.val_accuracies),
        }
        places = {name: by_train if name.startswith("train_") else by_val for name in self.metrics}
        return known | {name: (places[name], values) for name, values in self.metrics.items()}

    def rows(self) -> list[dict[str, float]]:
        """The curves as a table: a dict for each epoch, counted from 0, with the values measured in it.

        Of several evaluations within an epoch it has the last one.
        """
        table: dict[int, dict[str, float]] = {}
        for name, (epochs, values) in self.columns().items():
            for epoch, value in zip(epochs, values, strict=False):
                if not isinstance(value, list | None):
                    table.setdefault(epoch, {"epoch": epoch})[name] = value
        return [table[epoch] for epoch in sorted(table)]

    def to_pandas(self) -> Any:
        """`rows` as a pandas.DataFrame with one row per epoch; needs pandas."""
        import pandas

        return pandas.DataFrame(self.rows())

    def _repr_html_(self) -> str:
        """For notebooks: a table of the epochs, or of the first and last ones."""
        from cyxjax.observe.report.html import table

        rows: list[dict[str, float]] = [{**row, "epoch": row["epoch"] + 1} for row in self.rows()]
        names = list(dict.fromkeys(name for row in rows for name in row))
        shown = rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS // 2], {}, *rows[-_MOST_ROWS // 2 :]]
        cells = [[f"{row[name]:.4g}" if name in row else "" for name in names] for row in shown]
        return f"<b>{self._title()}</b>{table(names, cells)}"

    def _title(self) -> str:
        return f"{self.num_replicas} replicas, {self.samples_per_second:,.0f} samples/s"

    def plot(self, path: str | Path | None = None, others: Mapping[str, Self] | None = None) -> Any:
        """Draws loss and accuracy over epochs.

        path: a file to write (.svg, .png or .pdf), whose Path is returned; None: returns the matplotlib
        Figure, which a notebook shows. others: histories to compare with, by the names of their curves.
        Needs matplotlib: pip install 'cyxjax[plot]'.
        """
        from matplotlib.figure import Figure  # not pyplot, which opens windows and keeps state

        class NotebookFigure(Figure):
            def _repr_png_(self) -> bytes:  # without it a notebook shows only figures of pyplot
                written = io.BytesIO()
                self.savefig(written, format="png", dpi=80)
                return written.getvalue()

        figure = NotebookFigure(figsize=(9, 3.5), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        for name, one in {"": self, **(others or {})}.items():
            one._curves(losses, "loss", one.train_losses, one.val_losses, name)
            one._curves(accuracies, "accuracy", one.train_accuracies, one.val_accuracies, name)
        figure.suptitle(self._title())
        if path is None:
            return figure
        figure.savefig(path)
        return Path(path)

    def _curves(self, axes: Any, name: str, train: list[float], val: list[float], whose: str) -> None:
        by_steps = len(set(self.val_epochs)) < len(self.val_epochs)  # several evaluations within an epoch
        at_train, at_val = (self.steps, self.val_steps) if by_steps else (self.epochs, self.val_epochs)
        for label, values, places in (("train", train, at_train), ("validation", val, at_val)):
            if values:
                axes.plot(places, values, marker=".", label=f"{whose} {label}".strip())
        axes.set_xlabel("step" if by_steps else "epoch")
        axes.set_ylabel(name)
        axes.grid(visible=True, alpha=0.3)
        if axes.has_data():
            axes.legend()


def curve(history: DistributedTrainingHistory, monitor: str) -> list[tuple[int, float]]:
    """(step, value) of each measurement of `monitor` (val_loss, train_top2, ...); [] before the first."""
    _, values = history.columns().get(monitor, ([], []))
    steps = history.steps if monitor.startswith("train_") else history.val_steps
    return [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]


def not_undone(measured: Iterable[tuple[int, T]], step: float = math.inf) -> list[T]:
    """What was measured, given with its step, in a run that continues from `step`: without what a rollback
    undid."""
    found, before = list[T](), step + 1
    for at, value in reversed(list(measured)):
        if at < before:
            found.append(value)
            before = at
    return found[::-1]
