"""`cyxjax replay BOX`: repeats a run up to the step of a black box in one process and inspects it.

Starts from the box's checkpoint (if it no longer exists, from an earlier one or from the run's beginning),
with as many replicas as the run had, so that the numbers are the same. If an earlier step is already not
finite, that step is inspected.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from cyxjax.checkpoint.folders import list_steps
from cyxjax.command import Parser, existing_folder
from cyxjax.config.load import load_config
from cyxjax.core.mesh import REPLICATED
from cyxjax.core.step import Batch, TrainState
from cyxjax.data.ledger import StreamFacts
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR, DataError
from cyxjax.train.experiment import prepare
from cyxjax.train.feeding.placing import NO_SIGNAL
from cyxjax.train.hooks.black_box import CONFIG, BlackBox, read_box, samples_of
from cyxjax.train.hooks.hook import Feed, Position, RunState, overriding
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.replay.inspect import first_few, inspect_step, nonfinite_names
from cyxjax.train.trainer import DistributedTrainer

Before = Callable[[int], TrainState]
"""replica -> its state before a step, as host arrays: the state on the device is deleted"""


class Step(NamedTuple):
    """A step that was run again."""

    position: Position  # after the step
    came_from: Position  # before it, in its epoch
    batch: Batch
    state: TrainState
    loss: float  # mean over the samples; NaN for a step that was left out


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was found. Returns the exit code: 0 if the step is not finite again, 1 if it is finite now.

    Raises: DataError for a folder that is not a black box.
    """
    parser = Parser(
        prog="cyxjax replay",
        description=__doc__,
        epilog="example: cyxjax replay runs/digits/black_box_step40",
    )
    parser.add_argument(
        "box", type=existing_folder, metavar="BOX", help="a folder black_box_step... of a run"
    )
    folder = parser.parse_args(argv).box
    box = read_box(folder)
    trainer, plan, facts = _rebuilt(box, folder)
    found = _first_bad(trainer, plan, box)
    if found is None:
        print(
            f"Step {box.step} is finite now; it was {box.loss}. HINT: hardware, versions or data differ, "
            "or memory fails: compare `cyxjax env` of both machines."
        )
        return EXIT_USER_ERROR
    bad, before = found
    print(f"Step {box.step} was recorded with loss {box.loss}, samples {first_few(box.sample_ids)}.")
    what = "loss" if not math.isfinite(bad.loss) else "parameters are not finite after it; loss"
    print(f"Replayed: step {bad.position.step} is the first that is not finite: {what} {bad.loss}.")
    ids = np.array(samples_of(facts, bad.position.epoch, bad.came_from.samples))
    for line in inspect_step(trainer, plan.settings.step, before, bad.batch, ids):
        print(line)
    return EXIT_OK


def _rebuilt(box: BlackBox, folder: Path) -> tuple[DistributedTrainer, Plan, StreamFacts]:
    """The run as its configuration describes it, at the step that the box starts from."""
    devices = ["--cpu-devices", str(box.num_replicas)] if box.platform == "cpu" else []
    run = folder.resolve().parent  # it may have been moved, and its configuration may name a relative path
    home = ["--run-dir", str(run)] if (run / CONFIG).is_file() else []
    config = load_config(["--config", str(folder / CONFIG), "--verbose", "false", *devices, *home])
    earlier = [step for step in list_steps(config.checkpoint_path) if step <= (box.checkpoint_step or 0)]
    if not earlier:  # it starts over: from the parameters that the run began with, also those of `init_from`
        config = config.model_copy(update={"resume": "never"})
    _, _, trainer, plan = prepare(config, step=max(earlier, default=None))
    _say_start(trainer)
    facts = plan.feed.tape.facts
    if facts is None or samples_of(facts, box.epoch, box.first_sample) != box.sample_ids:
        raise DataError(
            f"{folder} names samples that differ from the current data ({first_few(box.sample_ids)}). "
            "HINT: replay with the data and global batch of the run."
        )
    return trainer, plan, facts


def _say_start(trainer: DistributedTrainer) -> None:
    """Prints the step that the run is repeated from, and what a replay does not repeat."""
    start = trainer.run_state.position.step
    print(f"Running again from step {start}.")
    for callback in overriding(trainer.callbacks, "next_state"):
        print(
            f"{type(callback).__name__} is not called in a replay: changes that it made after step {start}, "
            "for example to the learning rate, are missing."
        )


def _first_bad(trainer: DistributedTrainer, plan: Plan, box: BlackBox) -> tuple[Step, Before] | None:
    """The first step up to the box's that is not finite, and the state before it; None if all are finite."""
    start = trainer.run_state
    before = _by_replica(trainer.program, start.state)
    for step in _steps(trainer, plan.feed, start, box):
        if not math.isfinite(step.loss) or nonfinite_names(step.state.params):
            return step, before
        before = _by_replica(trainer.program, step.state)
    return None


def _by_replica(program: Program, state: TrainState) -> Before:
    """The state with whole parameters as each replica has it, on the host."""
    if program.sync.params_spec == REPLICATED or program.sync.keeps_parts:
        whole = jax.device_get(program.agreed(state))
        return lambda replica: whole
    own = jax.device_get(state)  # replicas may differ
    return lambda replica: own._replace(params=jax.tree.map(lambda leaf: leaf[replica], own.params))


def _steps(trainer: DistributedTrainer, feed: Feed, start: RunState, box: BlackBox) -> Iterator[Step]:
    """Yields each step from `start` up to the box's, across epochs, without the samples that the last
    rollback before it skipped. A state is deleted by the next step."""
    began, state = Position(*box.began), start.state
    position = began if start.position.step == began.step else start.position
    while position.step < box.step:
        for batch, samples, *_ in feed.train(position, lambda: NO_SIGNAL, 1):
            state, sums = trainer.program.train_step(state, batch)
            before = position
            position = before.after(samples)
            found = trainer.program.read_sums(position, sums)
            loss, weight = found.sums[0]
            yield Step(position, before, batch, state, math.nan if found.left_out else loss / (weight or 1))
            if position.step == box.step:
                return
            if position.step == began.step:
                position = began
                break
        else:
            position = position.next_epoch()
