"""Formats records as console lines, shortened to the available width."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from cyxjax.files import scaled
from cyxjax.observe.history import not_undone
from cyxjax.observe.records import Record, plain, step_of
from cyxjax.observe.stop_reasons import reason_of

_SHOWN = {  # key of a record -> (label on a line, format of its number)
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
# the report has their curves
_NOT_ON_LINES = ("kind", "step", "epoch", "batch", "grad_norm", "train_grad_norm")
_MOST_OWN = 4  # metrics of the user on a line; the others are only in the records
_DOING = {  # by phase of the heartbeat, except the phases of every step
    "init": "starting",
    "idle": "starting",
    "compile": "compiling",
    "eval": "evaluating",
    "checkpoint": "checkpoint",
}
_WAITING = {
    "data": "waiting for data",
    "step": "waiting for the devices",
    "collective": "waiting for the devices",
}
_LONG_S = 2.0  # in a phase of every step; shorter waits are normal


class RunLines:
    """The lines of one run: its progress, and numbers that are aligned between lines.

    total_steps, epochs: of the whole run; None if not known.
    """

    def __init__(self, total_steps: int | None = None, epochs: int | None = None) -> None:
        self._total_steps, self._epochs = total_steps, epochs
        self._first: tuple[int, float] | None = None  # step, time: the program is compiled by then
        self._widths: dict[str, int] = {}

    def step_line(self, record: Record, now: float) -> str:
        """`Epoch 1/20, Batch 10, Loss: 0.4321, ..., step 10 of 400, 12.0 s left`."""
        step, left = step_of(record), self.left(record, now)
        batch = f"Batch {record.get('batch', step)}"
        parts = [self.epoch(record), batch, *self._aligned(record)]
        return ", ".join([*parts, *([self.step(step)] if self._total_steps else []), *left])

    def epoch_line(self, record: Record, best: str = "") -> str:
        """`Epoch  1/20, Loss: 0.4321, ..., best Val loss so far`; within an epoch `..., Batch 40, ...`.

        best: the key of the value that no earlier line had better; "" if there is none.
        """
        within = [f"Batch {record['batch']}"] if "batch" in record else []
        mark = [f"best {_label(best)} so far"] if best else []
        return ", ".join([self.epoch(record), *within, *self._aligned(record), *mark])

    def live(self, record: Record, step: int, doing: str, left: Sequence[str]) -> list[str]:
        """The parts of a live line, the most important first."""
        parts = [doing] if doing else []
        parts += [self.step(step)] if step >= 0 else []
        if record:
            loss, *others = [f"{name}: {value}" for name, value in numbers(record)] or [""]
            parts += [part for part in (self.epoch(record), loss, *left, *others) if part]
        return parts

    def step(self, step: int) -> str:
        """`step 10 of 400`."""
        return f"step {step} of {self._total_steps}" if self._total_steps else f"step {step}"

    def epoch(self, record: Record) -> str:
        """`Epoch  3/20`: displayed epochs are counted from 1."""
        number = int(plain(record.get("epoch", 0))) + 1
        return (
            f"Epoch {number:>{len(str(self._epochs))}}/{self._epochs}" if self._epochs else f"Epoch {number}"
        )

    def left(self, record: Record, now: float) -> list[str]:
        """`["12.0 s left"]` at the pace since the first record; [] if the pace or the end is not known."""
        step = step_of(record)
        if self._first is None:
            self._first = (step, now)
        first, since = self._first
        if not self._total_steps or not first < step < self._total_steps:
            return []
        return [f"{span((now - since) / (step - first) * (self._total_steps - step))} left"]

    def _aligned(self, record: Record) -> list[str]:
        aligned = []
        for name, value in numbers(record):
            width = self._widths[name] = max(len(value), self._widths.get(name, 0))
            aligned.append(f"{name}: {value:>{width}}")
        return aligned


def numbers(record: Record) -> list[tuple[str, str]]:
    """(label, value) pairs of a line: those of every run, and the user's first metrics before the rate."""
    own = [key for key in record if key not in _SHOWN and key not in _NOT_ON_LINES]
    keys = list(_SHOWN)
    end = keys.index("learning_rate")
    found = []
    for key in (*keys[:end], *own[:_MOST_OWN], *keys[end:]):
        if key in record:
            value = plain(record[key])
            _, form = _SHOWN.get(key, ("", ".4f"))
            found.append((_label(key), value if isinstance(value, str) else format(value, form)))
    return found


def _label(key: str) -> str:
    """The name of a record's value on a line."""
    known, _ = _SHOWN.get(key, (None, ""))
    return known or key.removeprefix("train_").replace("val_", "Val ", 1)


def fitted(parts: Sequence[str], width: int) -> str:
    """The parts joined by commas, without those that do not fit into `width` columns; the first is cut."""
    line = "".join(parts[:1])[: max(width, 0)]
    for part in parts[1:]:
        if len(line) + 2 + len(part) <= width:
            line += f", {part}"
    return line


def doing(phase: str, for_s: float, part: str = "") -> str:
    """What a run does besides training steps: `compiling 12 s`, `evaluating 3/5`. part: the progress."""
    known = _DOING | _WAITING if for_s > _LONG_S else _DOING
    if phase not in known:
        return ""
    return " ".join([known[phase], *([part] if part else []), *([f"{for_s:.0f} s"] if for_s >= 1 else [])])


def span(seconds: float) -> str:
    """`3.9 s`, `12 min 5 s`, `3 h 20 min`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "an unknown time"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def counted(number: int, noun: str) -> str:
    """`1 replica`, `20 epochs`, `4,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def batch_plan_line(
    batch_size: int | None, num_replicas: int, accumulation: int, more: Mapping[str, object]
) -> str:
    """`Batch plan: 32 samples x 4 replicas x 2 accumulation = 256 per step; world_size 2, ...`.

    batch_size: None if a loader determines it for each batch.
    """
    dealt = f"{counted(num_replicas, 'replica')} x {accumulation} accumulation"
    if batch_size is None:
        plan = f"as many samples as the loader's batches have, over {dealt}"
    else:
        total = batch_size * num_replicas * accumulation
        plan = f"{counted(batch_size, 'sample')} x {dealt} = {total} per step"
    return "Batch plan: " + "; ".join([plan, *(f"{key} {value}" for key, value in more.items())])


def line_of_test(metrics: Mapping[str, float]) -> str:
    """`Test: loss 0.0477, accuracy 0.9805`; the first few of many metrics; the others are in the report."""
    known = [f"{name} {value:.4f}" for name, value in metrics.items() if not math.isnan(value)]
    return f"Test: {', '.join(known[: 2 + _MOST_OWN])}"  # loss and accuracy first


def left_out_line(skipped_steps: int) -> str:
    """`2 steps left out, not finite`."""
    return f"{counted(skipped_steps, 'step')} left out, not finite"


def done_line(history: Any, run_dir: str | None) -> str:
    """`Done: 5 epochs in 12.3 s, 4,321 samples/s, best Val accuracy 0.9800 (epoch 3), last 0.9700. ...`."""
    epochs = len(history.train_losses)
    done = counted(epochs, "epoch") if epochs else counted(history.num_steps, "step")
    parts = [
        f"Done: {done} in {span(history.total_time_seconds)}",
        f"{history.samples_per_second:,.0f} samples/s",
    ]
    if history.peak_memory_bytes:
        parts.append(f"{scaled(history.peak_memory_bytes, 'B')} of memory")
    if history.flops_per_second:
        mfu = f" (MFU {history.mfu:.0%})" if history.mfu else ""
        parts.append(f"{scaled(history.flops_per_second, 'FLOP/s')}{mfu}")
    parts += _best(history)
    if history.skipped_steps:
        parts.append(left_out_line(history.skipped_steps))
    if history.stopped_by:
        parts.append(f"stopped by {reason_of(history.stopped_by).note}")
    commit = f" Git commit: {history.commit}." if history.commit else ""
    return f"{', '.join(parts)}.{commit}" + (f" Run folder: {run_dir}" if run_dir else "")


def _best(history: Any) -> list[str]:
    """`["best Val accuracy 0.9800 (epoch 3)", "last 0.9700"]`; the loss for a task without accuracy."""
    for name, values, pick in (
        ("accuracy", history.val_accuracies, max),  # NaN: the task has none
        ("loss", history.val_losses, min),
    ):
        measured = zip(history.val_steps, zip(values, history.val_epochs, strict=False), strict=False)
        finite = [one for one in not_undone(measured) if math.isfinite(one[0])]
        if finite:
            best, epoch = pick(finite, key=itemgetter(0))
            return [f"best Val {name} {best:.4f} (epoch {epoch + 1})", f"last {values[-1]:.4f}"]
    return []
