"""`on_nonfinite: rollback`, `on_loss_spike: rollback`: returns to the newest good checkpoint and continues
with the samples after the bad step.

The samples between the checkpoint and the bad step are skipped: the same samples from the same state would
give the same numbers again. The learning rate is not changed, because such a change would outlive its cause.
Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5.1: restart earlier and skip the batches.
"""

from collections.abc import Callable

import numpy as np

from cyxjax.checkpoint.checkpointer import Checkpoints
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.errors import BadStepError, CheckpointError, LossSpikeError, NonFiniteError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.hooks.hook import Position, RunState
from cyxjax.train.resume import position_of
from cyxjax.train.settings import Settings, StepPlan

_FLOAT16_STEPS = 50  # left out in a row, which no loss scale explains: 2^16 is at its minimum after 30


def patience(step: StepPlan) -> int:
    """The number of steps in a row, left out as not finite, that is an error."""
    return 1 if step.on_nonfinite == "rollback" and not step.uses_float16 else _FLOAT16_STEPS


def with_rollbacks(
    run: Callable[[RunState], RunState],
    start: RunState,
    go_back: Callable[[int], RunState | None],
    say: Callable[[str], None],
    settings: Settings,
    history: DistributedTrainingHistory,
) -> RunState:
    """`run(start)`; runs again past a bad step, if `settings` say so, up to `max_rollbacks` times.

    go_back: step -> the state of the newest good checkpoint at or before it, None if there is none; called on
    all ranks. The skipped samples are noted in `history`.
    Raises: what `run` raises, unless it rolls back; CheckpointError without a checkpoint to go back to.
    """
    asked = {NonFiniteError: settings.step.on_nonfinite, LossSpikeError: settings.guard.on_loss_spike}
    causes: tuple[type[BadStepError], ...] = tuple(
        cause for cause, policy in asked.items() if policy == "rollback"
    )
    left = settings.guard.max_rollbacks
    while True:
        try:
            return run(start)
        except causes as error:
            if not left:
                error.args = (f"after max_rollbacks={settings.guard.max_rollbacks} rollbacks, {error}",)
                raise
            left -= 1
            start = _past(go_back(error.good_step), error)
            history.rollback_epochs.append(start.position.epoch)
            history.rollback_samples.append(start.position.samples)
            history.rollback_batches.append(start.position.step_in_epoch)
            history.rollback_steps.append(error.position.step - start.position.step)
            say(
                f"WARNING: {error.brief}: back to the checkpoint of step {start.position.step}, continuing "
                f"with the samples after sample {start.position.samples} of epoch {start.position.epoch + 1}."
            )


def make_room(checkpointer: Checkpoints, step: int, resumed: bool, say: Callable[[str], None]) -> None:
    """Renames the checkpoints that do not belong to a run at `step`: those after it, or, unless the run
    `resumed` from one of them, all, because they belong to an earlier run.
    """
    why = "abandoned" if resumed else "earlier"
    gone = checkpointer.rewind(step if resumed else 0, why)
    if gone:
        steps, whose = ", ".join(map(str, gone)), "this run" if resumed else "an earlier run"
        say(
            f"Checkpoints of {whose} ({steps}) are kept as step_*.{why}-* in "
            f"{checkpointer.directory}: training continues from step {step}."
        )


def newest_to_go_back_to(
    checkpointer: Checkpoints, good_step: int, counts: Callable[[Position], bool]
) -> int | None:
    """The newest step with a checkpoint that is `good_step` or before, and counts.

    If there is none, the step after `good_step`, although its update may have caused the spike; or None.
    """
    steps = []
    for step in checkpointer.steps():
        assert checkpointer.directory is not None  # it has steps
        folder = step_folder(checkpointer.directory, step)
        if step <= good_step + 1 and counts(position_of(read_manifest(folder).meta)):
            steps.append(step)
    return max([step for step in steps if step <= good_step] or steps, default=None)


def _past(saved: RunState | None, error: BadStepError) -> RunState:
    """The state of `saved`, at the place in the data after the bad step."""
    if saved is None:
        raise CheckpointError(
            f"there is no checkpoint of step {error.good_step} or before to roll back to: {error.brief}. "
            "HINT: set checkpoint_every_n_steps, and keep_last high enough that an earlier one still exists."
        ) from error
    place = error.position._replace(step=saved.position.step)
    sums = saved.sums if saved.position.epoch == place.epoch else np.zeros_like(saved.sums)
    return RunState(place, saved.state, sums)
