"""What people read while a run goes on: rank 0 only, live on a terminal, plain lines elsewhere.

All consoles have the same five methods, so the loop never asks which one it has.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO, cast

from cyxjax.observe.records import Record, plain

_CLEAR_TO_END = "\x1b[K"
_SHOWN = {  # key of a record -> (how it is called on a line, how its number is written)
    "loss": ("Loss", ".4f"),
    "train_loss": ("Loss", ".4f"),
    "accuracy": ("Accuracy", ".4f"),
    "train_accuracy": ("Accuracy", ".4f"),
    "val_loss": ("Val loss", ".4f"),
    "val_accuracy": ("Val accuracy", ".4f"),
    "learning_rate": ("LR", ".3g"),
    "samples_per_second": ("samples/s", ",.0f"),
    "seconds": ("seconds", ".1f"),
}


class Console(Protocol):
    """Where a run says what it does."""

    def note(self, text: str) -> None:
        """One line of news."""

    def batch_plan(self, *, batch_size: int, num_replicas: int, accumulation: int, **more: object) -> None:
        """How the effective batch comes about, once at the start."""

    def step(self, record: Record) -> None:
        """Progress inside an epoch, every `log_every_n_batches` steps."""

    def epoch(self, record: Record) -> None:
        """The end of an epoch."""

    def done(self, history: Any, run_dir: str | None = None) -> None:
        """The last line: what came out, and where it lies."""


class NullConsole:
    """Says nothing: other ranks, and `verbose = False`."""

    def note(self, text: str) -> None: ...
    def batch_plan(
        self, *, batch_size: int, num_replicas: int, accumulation: int, **more: object
    ) -> None: ...
    def step(self, record: Record) -> None: ...
    def epoch(self, record: Record) -> None: ...
    def done(self, history: Any, run_dir: str | None = None) -> None: ...


class PlainConsole:
    """One line for each thing, flushed, without colour or control characters: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _PatientStream(stream if stream is not None else sys.stdout)

    def note(self, text: str) -> None:
        self._write(text)

    def batch_plan(self, *, batch_size: int, num_replicas: int, accumulation: int, **more: object) -> None:
        self._write(batch_plan_line(batch_size, num_replicas, accumulation, more))

    def step(self, record: Record) -> None:
        self._write(step_line(record))

    def epoch(self, record: Record) -> None:
        self._write(epoch_line(record))

    def done(self, history: Any, run_dir: str | None = None) -> None:
        self._write(done_line(history, run_dir))

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class RichConsole:
    """For a terminal: steps overwrite one line, epochs and news stay above it, in colour.

    No live display of rich's: its thread hides the cursor, and a run that is killed would leave it hidden.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console as Terminal

        self._stream = _PatientStream(stream if stream is not None else sys.stdout)
        self._terminal = Terminal(file=cast(TextIO, self._stream), highlight=False, soft_wrap=True)
        self._on_step_line = False

    def note(self, text: str) -> None:
        self._print(text)

    def batch_plan(self, *, batch_size: int, num_replicas: int, accumulation: int, **more: object) -> None:
        self._print(batch_plan_line(batch_size, num_replicas, accumulation, more), style="dim")

    def step(self, record: Record) -> None:
        line = step_line(record)[: self._terminal.width - 1]  # a wrapped line could not be overwritten
        self._stream.write(f"\r{line}{_CLEAR_TO_END}")
        self._stream.flush()
        self._on_step_line = True

    def epoch(self, record: Record) -> None:
        self._print(epoch_line(record), style="bold")

    def done(self, history: Any, run_dir: str | None = None) -> None:
        self._print(done_line(history, run_dir), style="green")

    def _print(self, text: str, style: str | None = None) -> None:
        if self._on_step_line:
            self._stream.write(f"\r{_CLEAR_TO_END}")
            self._on_step_line = False
        self._terminal.print(text, style=style, markup=False)


class _PatientStream:
    """A text stream whose reader may go away (closed pipe, lost terminal): the run goes on unread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._isatty = bool(getattr(stream, "isatty", bool)())

    def write(self, text: str) -> int:
        # a terminal that knows only ASCII shows "?" for the rest
        shown = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda stream: stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._isatty

    def _try(self, act: Callable[[TextIO], object]) -> None:
        try:
            if self._stream is not None:
                act(self._stream)
        except (OSError, ValueError):  # ValueError: written to after it was closed
            self._stream = None


def build_console(is_master: bool, verbose: bool = True, stream: TextIO | None = None) -> Console:
    """The console for this rank: rich on a terminal, plain lines elsewhere, or silence."""
    if not (is_master and verbose):
        return NullConsole()
    target = stream if stream is not None else sys.stdout
    return RichConsole(stream) if target.isatty() else PlainConsole(stream)


def batch_plan_line(batch_size: int, num_replicas: int, accumulation: int, more: Mapping[str, object]) -> str:
    """`Batch plan: 32 samples x 4 replicas x 2 accumulation = 256 per step; world_size 2, ...`."""
    total = batch_size * num_replicas * accumulation
    parts = [
        f"{batch_size} samples x {num_replicas} replicas x {accumulation} accumulation = {total} per step"
    ]
    parts += [f"{key} {value}" for key, value in more.items()]
    return "Batch plan: " + "; ".join(parts)


def step_line(record: Record) -> str:
    """`Epoch 0, Batch 10, Loss: 0.4321, ...`."""
    return ", ".join([f"Epoch {record.get('epoch', 0)}", f"Batch {_batch(record)}", *_numbers(record)])


def epoch_line(record: Record) -> str:
    """`Epoch 0, Loss: 0.4321, Accuracy: 0.9100, Val loss: ...`."""
    return ", ".join([f"Epoch {record.get('epoch', 0)}", *_numbers(record)])


def done_line(history: Any, run_dir: str | None) -> str:
    """`Done: 5 epochs in 12.3 s, 4,321 samples/s, best Val accuracy 0.9800. Run folder: runs/digits`."""
    text = f"Done: {len(history.train_losses)} epochs in {history.total_time_seconds:.1f} s"
    text += f", {history.samples_per_second:,.0f} samples/s"
    accuracies = [a for a in history.val_accuracies if math.isfinite(a)]  # NaN: the task has none
    losses = [loss for loss in history.val_losses if math.isfinite(loss)]
    if accuracies:
        text += f", best Val accuracy {max(accuracies):.4f}"
    elif losses:
        text += f", best Val loss {min(losses):.4f}"
    if history.stopped_by:
        text += f", stopped by {history.stopped_by}"
    return text + "." + (f" Run folder: {run_dir}" if run_dir else "")


def _batch(record: Record) -> object:
    return record.get("batch", record.get("step", 0))


def _numbers(record: Record) -> list[str]:
    shown = []
    for key, (label, form) in _SHOWN.items():
        value = plain(record[key]) if key in record else ""
        if value != "":
            shown.append(f"{label}: {value if isinstance(value, str) else format(value, form)}")
    return shown
