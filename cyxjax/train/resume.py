"""Saves and restores the state of a run: what the trainer and its hooks need from checkpoints.

A resume, from the top, each in one function:
    train/plan.py                own_checkpoint      the newest good step, which the start is planned for
    train/resume.py              restore, load       the run; its state as stored and as trained
    checkpoint/checkpointer.py   restore             that step; damaged ones are set aside
    checkpoint/restoring.py      load                one step: verified, compared with what is wanted, read
    checkpoint/manifest.py       find_problems       its manifest, and its files
"""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.checkpoint.checkpointer import Checkpoints
from cyxjax.checkpoint.manifest import Manifest
from cyxjax.checkpoint.tree import Put
from cyxjax.checkpoint.writers import is_spread
from cyxjax.core import portable
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import named_leaves
from cyxjax.errors import CheckpointError
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.console import Console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.checkpoints import newest_in, open_checkpoints, restorer
from cyxjax.train.comparison import (
    compare_with_checkpoint,
    compare_with_digests,
    naming_settings,
)
from cyxjax.train.comparison import to_meta as facts_to_meta
from cyxjax.train.hooks import all_callbacks
from cyxjax.train.hooks.all_callbacks import STATES
from cyxjax.train.hooks.hook import Position, RunState
from cyxjax.train.plan import Plan, input_shapes
from cyxjax.train.program import Program
from cyxjax.train.run_state import Run
from cyxjax.train.schedules import DECAY, decay_of

_LOG = logging.getLogger(__name__)


def start(plan: Plan, program: Program, run: Run, console: Console) -> tuple[RunState, bool]:
    """(where a fit starts, whether at a checkpoint of its own folder): at what was loaded, at the newest
    checkpoint, or at step 0.

    Raises: CheckpointError for a checkpoint that cannot be used.
    """
    loaded_from = run.loaded_from
    resumed = loaded_from is None and _resume(plan, program, run, console)
    run.folder = plan.settings.saving.folder
    if resumed or loaded_from:
        is_master = plan.group.topology.is_master
        compare_with_checkpoint(run.restored, plan.facts, plan.settings, is_master=is_master)
        if not plan.data.indexed:
            position, is_endless = run.state.position, plan.settings.reading.steps_per_epoch is not None
            consumed = position.samples + (position.earlier if is_endless else 0)
            run.stream_positions.check_world_size(plan.group.topology.world_size, consumed)
    else:
        for line in run.notes:
            console.note(line)
    return run.state, resumed or loaded_from == Path(plan.settings.saving.folder).resolve()


def _resume(plan: Plan, program: Program, run: Run, console: Console) -> bool:
    """Restores the newest checkpoint of the run's folder if the plan asks for it; False without one."""
    saving, group = plan.settings.saving, plan.group
    if saving.resume == "never":
        return False
    # Looked for again: since the start was planned, another job may have saved there and ended.
    newest = newest_in(saving.folder, group, known=plan.own) or plan.own
    if newest is None:
        return False
    run.refuse_replacing(plan, newest)
    report_progress(-1, "checkpoint")
    restore(plan, program, run, saving.folder, newest, in_place=True)
    place = run.state.position
    _refuse_other_rates(plan, run)
    compare_with_digests(saving.folder, place.step, plan.settings, group)
    console.note(
        f"Resuming from step {place.step} (epoch {place.epoch + 1}, sample {place.samples}) in "
        f"{saving.folder}"
    )
    report_progress(-1, "idle")
    return True


def _refuse_other_rates(plan: Plan, run: Run) -> None:
    """Raises: CheckpointError if a step was restored for which the decay of the rate was not planned."""
    planned, step = plan.settings.step.rate.decay, run.state.position.step
    expected = plan.own.step if plan.own else 0
    if step != expected and planned and planned.made_for and planned != decay_of(run.restored.get(DECAY)):
        raise CheckpointError(
            f"this start was planned from step {expected}, but the newest good checkpoint in "
            f"{plan.settings.saving.folder} is of step {step}, which needs other learning rates. HINT: run "
            "the same command again."
        )


def restore(
    plan: Plan,
    program: Program,
    run: Run,
    folder: Path,
    newest: Manifest,
    step: int | None = None,
    *,
    in_place: bool = False,
) -> None:
    """Restores `newest`, which `newest_in` found in `folder`, or `step`, as the current state.

    in_place: for the run's own folder: see `load`; damaged steps are set aside if the run saves there.
    Raises: CheckpointError for a step that cannot be used, and if none is there any more.
    """
    group, here = plan.group, run.state.state
    names = tuple(newest.meta.get("classes", ()))
    if names and run.class_names and names != run.class_names:
        raise CheckpointError(
            f"the checkpoint has the classes {', '.join(names)}; this run {', '.join(run.class_names)}. "
            "HINT: train on the classes of the checkpoint, or start over (resume: never)."
        )
    saves = in_place and plan.settings.saving.saves
    checkpointer = restorer(folder, group, saves=saves, known=newest)
    with naming_settings(plan, folder, newest.meta):
        found = load(checkpointer, here, program.sync, group.mesh, step, in_place=in_place)
    if found is None:
        raise CheckpointError(
            f"{folder} does not hold step {newest.step} any more. HINT: bring it back, or run the same "
            "command again to start over."
        )
    moment, history, meta = found
    metrics = plan.recipe.metrics
    equal = tuple(meta.get("metrics", metrics.names)) == metrics.names
    sums = metrics.arranged(moment.sums, meta.get("row_names", metrics.row_names if equal else ()))
    position = run.stream_positions.restore(meta, moment.position, group.topology.rank)
    run.state = moment._replace(position=position, sums=sums)
    run.class_names = run.class_names or names
    run.restored, run.first_step, run.hooks = meta, int(meta.get("first_step", 0)), []
    run.ledger.restore(meta, moment.position)
    history.stopped_by = ""
    run.history = history
    run.describe_group(plan)


def to_meta(plan: Plan, run: Run, moment: RunState) -> dict[str, Any]:
    """What a checkpoint of `moment` holds beside its arrays, as JSON values."""
    meta = {
        "position": moment.position.numbers(),
        "sums": moment.sums[:-1].tolist(),
        "grad_norm": moment.sums[-1].tolist(),
        "first_step": run.first_step,
        DECAY: plan.settings.step.rate.decay or run.restored.get(DECAY),
        "history": run.history.to_dict(),
        "inputs": input_shapes(plan.inputs),
        # the fields of a named tuple, also those without arrays
        "input_fields": list(getattr(plan.inputs, "_fields", ())),
        "metrics": list(plan.recipe.metrics.names),
        "row_names": plan.recipe.metrics.row_names,
    }
    states = all_callbacks.states(run.hooks) if run.hooks else run.restored.get(STATES, {})
    meta |= {STATES: states} | facts_to_meta(plan.facts) | run.stream_positions.meta(moment.position)
    meta |= {"classes": list(run.class_names)} if run.class_names else {}
    return meta | run.ledger.meta(moment)


def from_meta(meta: dict[str, Any], state: TrainState) -> tuple[RunState, DistributedTrainingHistory]:
    """The moment and history that `to_meta` stored. Raises: CheckpointError if they are missing."""
    try:
        position = position_of(meta)
        history = DistributedTrainingHistory.from_dict(meta["history"])
        sums = np.array([*meta["sums"], meta["grad_norm"]], np.float64)
        return RunState(position, state, sums), history
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(
            f"the checkpoint was not written by a trainer ({type(err).__name__}: {err}). "
            "HINT: name a folder that fit or save_checkpoint wrote."
        ) from err


def position_of(meta: dict[str, Any]) -> Position:
    """The stored position. Raises: KeyError, TypeError, ValueError if there is none."""
    return Position(**{name: int(value) for name, value in meta["position"].items()})


def save_at(path: str | Path, plan: Plan, program: Program, run: Run, moment: RunState) -> None:
    """Saves `moment` as the newest step of the folder `path`, where only the best older step is kept.

    Raises: CheckpointError if it cannot.
    """
    stored = portable.to_portable(moment.state, program.sync, plan.group.mesh)
    together = is_spread(dict(named_leaves(stored)))
    with open_checkpoints(
        path, plan.group, together=together, keep_last=1, async_save=False, max_failures=1
    ) as checkpointer:
        # Later steps of an older run must not count as the newest.
        if gone := checkpointer.rewind(moment.position.step, "earlier"):
            _LOG.warning("%s held later steps (%s); they are kept as step_*.earlier-*.", path, gone)
        checkpointer.save(moment.position.step, stored, to_meta(plan, run, moment))


def load(
    checkpointer: Checkpoints,
    like: TrainState,
    sync: Sync,
    mesh: Mesh,
    step: int | None = None,
    *,
    in_place: bool = False,
) -> tuple[RunState, DistributedTrainingHistory, dict[str, Any]] | None:
    """(moment, history, meta) of the newest good step, or of `step`, shaped like `like`; None without one.

    Each leaf is read, put on the devices and released before the next. in_place: each leaf of `like` is
    deleted before its replacement is read, so that two states are never held.
    Raises: CheckpointError for damage, and for the state of a different model.
    """
    target, fit_rows = portable.stored_shapes(like, sync, mesh)
    restored = checkpointer.restore(target, step, adapt=fit_rows, put=placing(mesh, in_place=in_place))
    if restored is None:
        return None
    return *from_meta(restored.meta, restored.state), restored.meta


def placing(mesh: Mesh, *, in_place: bool) -> Put:
    """A function that reads a leaf and puts it on the devices; in_place: the old leaf is deleted first.

    One leaf is held in addition to the state: on the host and, unless in_place, on the devices.
    """

    def put(want: Any, read: Callable[[], np.ndarray]) -> Any:
        if in_place:
            _give_up(want)
        # Waits: a running transfer keeps the host's array, and the next leaf would be held in addition.
        leaf = jax.block_until_ready(portable.placed(want, read(), mesh))
        gc.collect(0)  # jax releases the host's arrays that its threads have copied
        return leaf

    return put


def _give_up(want: Any) -> None:
    """Frees the device memory of a leaf, or of the leaf that a share belongs to."""
    leaf = getattr(want, "leaf", want)
    if isinstance(leaf, jax.Array):
        leaf.delete()
