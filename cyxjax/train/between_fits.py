"""What a trainer does with the state of its run outside a fit: evaluate, predict, load, read the values."""

from pathlib import Path
from typing import Any

import jax

from cyxjax.core.mesh import local_value
from cyxjax.core.model.lora import merged
from cyxjax.core.objective.split_check import is_own
from cyxjax.core.trees import PyTree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import loop, resume
from cyxjax.train.checkpoints import newest_in
from cyxjax.train.checks import order as checks
from cyxjax.train.comparison import changed_files
from cyxjax.train.feeding.feed import eval_batches
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.feeding.predicting import Source, predict_all
from cyxjax.train.plan import plan_of_checkpoint
from cyxjax.train.program import Recipe
from cyxjax.train.run_state import Run
from cyxjax.train.start.dispatch import placer_for


def values(run: Run) -> tuple[PyTree, PyTree]:
    """(parameters, model state) as evaluation sees them, host arrays."""
    plan, program = run.begun()
    seen = program.evaluated(run.state.state)
    params, model_state = jax.tree.map(local_value, (seen.params, seen.model_state))
    return merged(params, plan.settings.step.lora), model_state


def evaluate(run: Run, samples: FitData, batch_size: int | None, max_batches: int | None) -> dict[str, Any]:
    """All metrics by name over `max_batches` of `samples`, or all of them. Raises: DataError, ConfigError."""
    plan, program = run.begun()
    step, recipe, state = plan.settings.step, plan.recipe, run.state.state
    size = batch_size or step.batch.batch_size
    labels = checks.before_evaluation(plan, program, state, samples, size)
    placer = placer_for(step, plan.group.mesh, unpadded=is_own(recipe.loss, recipe.metrics))
    return loop.evaluate(program, state, eval_batches(placer, samples.train, size, max_batches, labels))


def predict(run: Run, source: Source, batch_size: int | None) -> PyTree:
    """The outputs for the rows of `source`, as NumPy arrays. Raises: DataError if there are no rows."""
    plan, program = run.begun()
    each = batch_size or plan.settings.step.batch.batch_size
    seen = program.consensus(run.state.state)
    return predict_all(program.predict_step, seen, plan.group.mesh, source, each)


def load(run: Run, path: str, step: int | None, recipe: Recipe, group: ProcessGroup) -> None:
    """Restores the newest good step in the folder `path`, or `step`. Raises: CheckpointError."""
    newest = newest_in(Path(path), group)
    if newest is None:
        raise CheckpointError(
            f"{path!r} holds no checkpoint. HINT: name the folder that save_checkpoint made, or the "
            "checkpoints/ folder of a run."
        )
    if run.is_drawn:
        run.begin(plan_of_checkpoint(recipe, group, newest.meta)._replace(own=newest))  # nothing is drawn
    resume.restore(*run.begun(), run, Path(path), newest, step)
    files = changed_files(run.restored) if group.topology.is_master else []
    if files:
        warn_on_stderr(
            f"WARNING: {', '.join(files)} changed since the checkpoint was written: the loaded model "
            "uses the current code. HINT: go back to the code of the checkpoint, or train again."
        )
    run.loaded_from, run.is_drawn = Path(path).resolve(), False
