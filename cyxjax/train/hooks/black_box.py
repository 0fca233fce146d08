"""Writes what is needed to repeat a step that was not finite: `black_box_step12/` in the run folder.

box.json names the step, its samples, the key, and the checkpoint to start from; config.yaml is the run's.
`cyxjax replay` reads the folder.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cyxjax.checkpoint.folders import list_steps
from cyxjax.core.mesh import local_value
from cyxjax.data.ledger import StreamFacts
from cyxjax.errors import DataError
from cyxjax.files import read_plain
from cyxjax.observe.records import plain, warn_if_unwritten, write_atomic
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.run_folder import RunFolder
from cyxjax.train.hooks.hook import Hook, Position, RunState, StepInfo

FILE, CONFIG = "box.json", "config.yaml"
_MOST = 3  # boxes per fit: later ones mostly repeat the first


class BlackBox(NamedTuple):
    """One step that was not finite. Numbers count from 0, except `step`: optimizer steps done with it."""

    step: int
    epoch: int
    step_in_epoch: int
    loss: float | str  # NaN and infinities as text; "left out" if all ranks skipped the step
    sample_ids: list[int]
    key_data: list[int]
    checkpoint_step: int | None  # newest checkpoint before the step; None: the run's beginning
    num_replicas: int
    world_size: int
    platform: str
    first_sample: int  # place in the epoch's order at which the step began
    began: Sequence[int] = ()  # the `Position` of the last start or rollback before the step
    format: int = 1


class BlackBoxHook(Hook):
    """Writes a box for the first steps that are not finite. Comes before the hook that ends the run.

    experiment: the text of the configuration file that runs it again. left_out_too: also writes a box for a
    step that was left out. note: prints a line.
    """

    def __init__(
        self,
        folder: RunFolder,
        experiment: str,
        facts: StreamFacts | None,
        num_replicas: int,
        left_out_too: bool,
        note: Callable[[str], None],
    ):
        self._folder, self._experiment = folder, experiment
        self._facts, self._num_replicas = facts, num_replicas
        self._left_out_too, self._note = left_out_too, note
        self._written = 0

    def on_start(self, moment: RunState) -> None:
        self._key_data = local_value(moment.state.key).tolist()
        self._before = moment.position
        self._began = list(moment.position.numbers().values())

    def on_step(self, info: StepInfo) -> None:
        before, self._before = self._before, info.position
        loss_sum, weight = info.sums[0]
        is_bad = (info.left_out and self._left_out_too) or not math.isfinite(loss_sum)
        if is_bad and self._written < _MOST:
            self._written += 1
            first = info.position.samples - info.position.samples_since(before)
            self._write(info.position, first, "left out" if info.left_out else plain(loss_sum / weight))

    def _write(self, position: Position, first: int, loss: Any) -> None:
        facts, folder = self._facts, self._folder.checkpoints
        before = [step for step in list_steps(folder) if step < position.step]
        box = BlackBox(
            position.step,
            position.epoch,
            position.step_in_epoch - 1,
            loss,
            samples_of(facts, position.epoch, first) if facts else [],
            self._key_data,
            max(before, default=None),
            self._num_replicas,
            jax.process_count(),
            jax.default_backend(),
            first,
            self._began,
        )
        path = self._path(box)
        with warn_if_unwritten(path, warn_on_stderr):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path / CONFIG, self._experiment)
            write_atomic(path / FILE, json.dumps(box._asdict(), indent=1) + "\n")
            what = "was left out: a gradient was not finite" if loss == "left out" else f"has the loss {loss}"
            self._note(f"Step {position.step} {what}. `cyxjax replay {path}` finds the cause.")

    def _path(self, box: BlackBox) -> Path:
        """Its folder: named after the step, and after its place if a step before a rollback has that name."""
        path, place = self._folder.black_box(box.step), (box.epoch, box.first_sample)
        with suppress(DataError):
            earlier = read_box(path)
            if (earlier.epoch, earlier.first_sample) != place:
                return self._folder.black_box(box.step, place)
        return path


def samples_of(facts: StreamFacts, epoch: int, first: int) -> list[int]:
    """The samples of the step of `epoch` that began at place `first`."""
    plan = facts.plan(first)
    return facts.ids(epoch, first, plan.span(0)[1]).tolist() if plan.num_steps else []


def read_box(folder: Path) -> BlackBox:
    """Reads the black box in `folder`. Raises: DataError if it is none, or of a different version."""
    try:
        box = BlackBox(**json.loads(read_plain(folder / FILE)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{folder} is not a black box: {error}. HINT: name a folder black_box_step... of a run."
        ) from error
    if box.format != 1:
        raise DataError(f"{folder}: {FILE} has a different version. HINT: use the cyxjax that wrote it.")
    return box
