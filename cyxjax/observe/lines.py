"""Formats records as console lines, shortened where there is little room."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cyxjax.launch.group.roster import ranks_text
from cyxjax.launch.heartbeat import WAITING, Progress
from cyxjax.observe.records import Record, plain
from cyxjax.observe.stop_reasons import reason_of

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
_PLACES = ("kind", "step", "epoch", "batch")
_NOT_ON_LINES = (*_PLACES, "grad_norm", "train_grad_norm")  # a curve of the report
_MOST_OWN = 4  # metrics of the user's on a line; the others stand in the records
_ORDER = (
    "loss",
    "accuracy",
    "samples_per_second",
    "learning_rate",
)  # of a live line, what stays longest first
_DOING = {"compile": "compiling", "eval": "evaluating", "init": "starting", "idle": "starting"}
LONG_S = 2.0  # in a phase that every step has: shorter is how training is


class Field(NamedTuple):
    """A part of a line. Of those that do not fit, the highest `rank` goes first, whole."""

    text: str
    rank: int


def fitted(fields: Sequence[Field], width: int) -> str:
    """The fields in their order, joined by commas, without those for which `width` columns have no room.

    A field that alone is too long is cut, since there is nothing else to show.
    """
    kept = list(fields)
    while len(kept) > 1 and len(_joined(kept)) > width:
        kept.remove(max(kept, key=lambda field: field.rank))
    return _joined(kept)[: max(width, 0)]


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width` columns, broken behind commas and full stops: no number is torn.

    A part that is too long by itself is broken at its spaces.
    """
    lines = [""]
    for part in re.split(r"(?<=[,;.]) ", text):
        for piece in [part] if len(part) + 2 <= width else part.split(" "):
            longer = f"{lines[-1]} {piece}" if lines[-1].strip() else lines[-1] + piece
            if len(longer) <= width or not lines[-1].strip():
                lines[-1] = longer
            else:
                lines.append(f"  {piece}")
    return "\n".join(lines)


def _joined(fields: Sequence[Field]) -> str:
    return ", ".join(field.text for field in fields)


def live_fields(
    record: Record,
    *,
    doing: str,
    step: int,
    total_steps: int | None,
    left_s: float | None,
    waiting: float | None,
    epochs: int | None = None,
) -> list[Field]:
    """What a live line says. waiting: the share of time spent waiting for data, 0 to 1."""
    fields = [Field(doing, 1)] if doing else []
    if record:
        fields.append(Field(epoch_text(record, epochs), 3))
    if step >= 0:
        fields.append(Field(f"step {step}" + (f" of {total_steps}" if total_steps else ""), 0))
    ranks = {key: 2 + 2 * n for n, key in enumerate(_ORDER)}
    ranks |= {key: 10 + n for n, key in enumerate(_own_keys(record))}
    fields += [
        Field(f"{name}: {value}", rank)
        for key, rank in ranks.items()
        for name, value in _labelled(record, [key])
    ]
    if waiting is not None and waiting >= 0.005:
        fields.append(Field(f"data {waiting:.0%}", 7))
    if left_s is not None:
        fields.append(Field(f"{span(left_s)} left", 3))
    return fields


def doing(phase: str, step: int, for_s: float, part: str = "", late: str = "") -> str:
    """What a run does besides training steps: `compiling 12 s`, `saving step 400`, `evaluating 3/5`.

    part: how far the phase is. late: the ranks that are waited for, `rank 1`.
    """
    since = f" {for_s:.0f} s" if for_s >= 1 else ""
    if phase == "checkpoint":
        return f"saving step {step}{since}" if step >= 0 else f"restoring{since}"
    if phase in ("data", "step", "collective"):
        held = "waiting for data" if phase == "data" else f"waiting for {late or 'the devices'}"
        return f"{held}{since}" if for_s > LONG_S else ""
    return f"{_DOING[phase]}{f' {part}' if part else ''}{since}" if phase in _DOING else ""


def late(own: Progress, others: Mapping[int, Progress]) -> str:
    """`rank 1`, `ranks 1, 3`: those of this host that a rank which waits in its step is waiting for.

    They are at an earlier step, or at this one in a phase of their own.
    """
    if own.phase not in WAITING:
        return ""
    behind = [
        rank
        for rank, progress in sorted(others.items())
        if progress.phase
        and (progress.step < own.step or (progress.step == own.step and progress.phase not in WAITING))
    ]
    return ranks_text(behind) if behind else ""


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


def epoch_text(record: Record, epochs: int | None) -> str:
    """`Epoch  3/20`: epochs are counted from 1 where people read them. epochs: of the whole run, if known."""
    number = int(plain(record.get("epoch", 0))) + 1
    return f"Epoch {number:>{len(str(epochs))}}/{epochs}" if epochs else f"Epoch {number}"


def batch_plan_line(
    batch_size: int | None, num_replicas: int, accumulation: int, more: Mapping[str, object]
) -> str:
    """`Batch plan: 32 samples x 4 replicas x 2 accumulation = 256 per step; world_size 2, ...`.

    batch_size: None where a loader decides it, batch by batch.
    """
    dealt = f"{counted(num_replicas, 'replica')} x {accumulation} accumulation"
    if batch_size is None:
        parts = [f"as many samples as the loader's batches have, over {dealt}"]
    else:
        total = batch_size * num_replicas * accumulation
        parts = [f"{counted(batch_size, 'sample')} x {dealt} = {total} per step"]
    parts += [f"{key} {value}" for key, value in more.items()]
    return "Batch plan: " + "; ".join(parts)


@dataclass
class Columns:
    """Lines of one run under each other: a number takes the widest room that a number of its name has had."""

    epochs: int | None = None  # of the whole run, where known
    _widths: dict[str, int] = field(default_factory=dict)

    def step_line(self, record: Record, total_steps: int | None = None, left_s: float | None = None) -> str:
        """`Epoch 1/20, Batch 10, Loss: 0.4321, ..., step 10 of 400, 12.0 s left`."""
        batch = record.get("batch", record.get("step", 0))
        parts = [epoch_text(record, self.epochs), f"Batch {batch}", *self._numbers(record)]
        parts += [f"step {record.get('step', 0)} of {total_steps}"] if total_steps else []
        return ", ".join([*parts, *([f"{span(left_s)} left"] if left_s is not None else [])])

    def epoch_line(self, record: Record, is_best: bool = False) -> str:
        """`Epoch  1/20, Loss: 0.4321, Accuracy: 0.9100, ..., best`; within an epoch `..., Batch 40, ...`."""
        within = [f"Batch {record['batch']}"] if "batch" in record else []
        best = ["best so far"] if is_best else []
        return ", ".join([epoch_text(record, self.epochs), *within, *self._numbers(record), *best])

    def _numbers(self, record: Record) -> list[str]:
        aligned = []
        for name, value in _labelled(record, _keys(record)):
            width = self._widths[name] = max(len(value), self._widths.get(name, 0))
            aligned.append(f"{name}: {value:>{width}}")
        return aligned


def line_of_test(metrics: Mapping[str, float]) -> str:
    """`Test: loss 0.0477, accuracy 0.9805`; of many metrics the first few, the rest stand in the report."""
    known = [f"{name} {value:.4f}" for name, value in metrics.items() if not math.isnan(value)]
    shown = known[: 2 + _MOST_OWN]  # loss and accuracy first
    return f"Test: {', '.join(shown)}" + (
        f", and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    )


def done_line(history: Any, run_dir: str | None) -> str:
    """`Done: 5 epochs in 12.3 s, 4,321 samples/s, best Val accuracy 0.9800 (epoch 3), last 0.9700. ...`."""
    epochs = len(history.train_losses)
    by_epochs = epochs or not history.num_steps
    done = counted(epochs, "epoch") if by_epochs else counted(history.num_steps, "step")
    text = f"Done: {done} in {span(history.total_time_seconds)}"
    text += "".join(f", {value}" for value in (f"{history.samples_per_second:,.0f} samples/s", *use(history)))
    for name, values, pick in (
        ("accuracy", history.val_accuracies, max),  # NaN: the task has none
        ("loss", history.val_losses, min),
    ):
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            best = pick(finite)
            text += f", best Val {name} {best:.4f}{_epoch_of(history, values.index(best))}"
            text += f", last {values[-1]:.4f}" if len(values) > 1 else ""
            break
    if history.stopped_by:
        text += f", stopped by {reason_of(history.stopped_by).note}"
    text += f". Git commit: {history.commit}" if history.commit else ""
    return text + "." + (f" Run folder: {run_dir}" if run_dir else "")


def use(history: Any) -> list[str]:
    """`["412.3 MB of memory", "2.1 TFLOP/s (MFU 41%)"]`, as far as it is known."""
    found = [f"{scaled(history.peak_memory_bytes, 'B')} of memory"] if history.peak_memory_bytes else []
    if history.flops_per_second:
        share = f" (MFU {history.mfu:.0%})" if history.mfu else ""
        found.append(f"{scaled(history.flops_per_second, 'FLOP/s')}{share}")
    return found


def scaled(count: float, unit: str) -> str:
    """`23.9 MB`, in powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.1f} {prefix}{unit}" if prefix else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} P{unit}"


def _epoch_of(history: Any, place: int) -> str:
    return f" (epoch {history.val_epochs[place] + 1})" if place < len(history.val_epochs) else ""


def _keys(record: Record) -> list[str]:
    """What is known of every run, and between loss and rate the first few of the user's metrics."""
    keys = list(_SHOWN)
    end = keys.index("learning_rate")
    return [*keys[:end], *_own_keys(record), *keys[end:]]


def _own_keys(record: Record) -> list[str]:
    return [key for key in record if key not in _SHOWN and key not in _NOT_ON_LINES][:_MOST_OWN]


def _labelled(record: Record, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(how it is called on a line, its value) of those of `keys` that `record` has."""
    for key in keys:
        value = plain(record.get(key, ""))
        label, form = _SHOWN.get(key) or (key.removeprefix("train_").replace("val_", "Val ", 1), ".4f")
        if value != "":
            yield label, value if isinstance(value, str) else format(value, form)
