"""One fit from its first step to its end, including rollbacks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from cyxjax.checkpoint.run_lock import locked
from cyxjax.core.mesh import num_replicas
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.errors import NotSavedError, OutOfMemoryError, translated
from cyxjax.launch.failure.record import PeerLost
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.console import Console
from cyxjax.observe.lines import batch_plan_line, left_out_line
from cyxjax.observe.records import Sink
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.observe.stop_reasons import CALLBACK, EARLY_STOPPING, EPOCHS, MAX_STEPS, reason_of
from cyxjax.train import resume, rollback
from cyxjax.train.checkpoints import checkpointer_for
from cyxjax.train.comparison import refuse_finished
from cyxjax.train.feeding import fit_data
from cyxjax.train.hooks.all_callbacks import STATES
from cyxjax.train.hooks.build import Fit, begin_callbacks, build_hooks
from cyxjax.train.hooks.hook import EpochInfo, Position, RunState
from cyxjax.train.hooks.progress import HistoryHook
from cyxjax.train.loop import Loop
from cyxjax.train.monitor import watchable_in
from cyxjax.train.plan import Plan, total_steps
from cyxjax.train.program import Program
from cyxjax.train.run_state import Run
from cyxjax.train.signals import StopSignals

_FINAL = (EARLY_STOPPING, MAX_STEPS, CALLBACK)  # reasons that end a run for good


def run_fit(
    plan: Plan,
    program: Program,
    run: Run,
    start: RunState,
    sink: Sink,
    console: Console,
    *,
    resumed: bool,
    hand_out: Callable[[], None] | None,
) -> NotSavedError | None:
    """Trains `plan` from `start` to its end, with all its hooks; updates the state and history of `run`.

    resumed: whether `start` comes from a checkpoint in the run's own folder. Returns the error if the final
    state could not be saved.
    """
    settings, group, history = plan.settings, plan.group, run.history
    run.begin_fit()
    shares, devices = settings.step.batch.num_shares, num_replicas(group.mesh)
    first_rows = fit_data.rows_of_first_step(plan.data)
    more: dict[str, object] = {"world_size": group.topology.world_size, "backend": group.backend}
    more |= {} if shares == devices else {"devices": devices}  # an exact run, whose replicas are virtual
    more |= {} if first_rows is None else {"first step of this process": f"{first_rows} samples"}
    batch_size = settings.step.batch.batch_size if first_rows is None else None
    console.note(batch_plan_line(batch_size, shares, settings.step.batch.accumulation, more))
    watchable, course = watchable_in(plan.recipe.metrics, plan.feed, settings.course), settings.course
    keeping = checkpointer_for(settings.saving, group, watchable.of(settings.watch).mode)
    with StopSignals() as signals, keeping as checkpointer:
        rollback.make_room(checkpointer, start.position.step, resumed, console.note)
        starts_over = not resumed and (settings.saving.resume == "never" or start.position.step > 0)
        fit = Fit(plan, program, run, watchable, signals, checkpointer, sink, console, starts_over, hand_out)
        console.begin(total_steps(plan, start.position, run.first_step), course.epochs)
        try:
            end = train_with_hooks(fit, start)
        finally:
            console.end()
        run.state = end
        reason = reason_of(history.stopped_by)
        if end.position == start.position and reason is not EPOCHS:
            if resumed and reason in _FINAL:
                refuse_finished(run.restored, plan.facts, settings.saving.folder)
            console.note(f"This run had already been stopped by {reason.note}. HINT: {reason.hint}.")
        unsaved = _unsaved(fit, end.position.step)
    if history.skipped_steps and settings.experiment is None:  # the last line of an experiment says it
        console.note(left_out_line(history.skipped_steps))
    if reason in _FINAL and end.position.step_in_epoch:
        means = program.training_means(start.position, end, history.skipped_steps)
        cut_short = EpochInfo(end.position._replace(epoch=end.position.epoch + 1), means, {})
        HistoryHook(history, fit.learning_rate).add_row(cut_short)
    return unsaved


def say_all_done(plan: Plan, run: Run, console: Console) -> None:
    """Says that nothing is left to train, also where the console is off. Raises: see `refuse_finished`."""
    folder, epochs = run.loaded_from or plan.settings.saving.folder, plan.settings.course.epochs
    refuse_finished(run.restored, plan.facts, folder)
    line = f"All {epochs} epochs are done. HINT: raise `epochs` to continue training."
    console.note(line)
    if not plan.settings.verbose and plan.group.topology.is_master:
        warn_on_stderr(f"{folder}: {line}")


def saved_by_one_job(plan: Plan) -> AbstractContextManager[None]:
    """A block in which no other job saves to the same folder; a run folder is locked already."""
    settings, is_master = plan.settings, plan.group.topology.is_master
    folder, run_folder = settings.saving.folder, settings.run_folder
    is_run_folder = run_folder is not None and folder.absolute() == run_folder.root.absolute()
    return locked(folder) if is_master and settings.saving.saves and not is_run_folder else nullcontext()


def _unsaved(fit: Fit, step: int) -> NotSavedError | None:
    """The error that all ranks raise if the state of `step` should be on disk but is not; None otherwise."""
    checkpointer = fit.checkpointer
    if not on_any_rank(fit.plan.group, "whether the last state was saved", bool(checkpointer.unsaved)):
        return None
    error = NotSavedError(
        f"The final state (step {step}) could not be saved in {checkpointer.directory}, also when "
        f"retried: {checkpointer.unsaved or 'see rank 0'}. HINT: free space or name another "
        "checkpoint_dir, then run the same command: it continues from the newest step in it."
    )
    error.__cause__ = None if checkpointer.unsaved else PeerLost("rank 0 could not save")
    return error


def train_with_hooks(fit: Fit, start: RunState) -> RunState:
    """Trains from `start` to the end, with rollbacks to a checkpoint if the configuration asks for them."""
    settings, hooks, history = fit.plan.settings, build_hooks(fit), fit.run.history
    fit.run.hooks = hooks
    training = Loop(
        fit.program,
        fit.plan.feed,
        hooks,
        settings.course._replace(max_steps=fit.max_steps),
        at_once=fit.plan.steps_at_once,
        any_rank=partial(on_any_rank, fit.plan.group),
        follow=fit.run.follow,
        skipped=lambda: history.skipped_steps,
    )

    def once(begin: RunState) -> RunState:
        place, going_back = begin.position, begin is not start
        # A rollback goes back to a checkpoint of this run, which is saved after the evaluation of its step;
        # one made after an epoch has it too. A callback may save before it.
        evaluated = going_back or not place.step_in_epoch or place.step in history.val_steps
        if place.step_in_epoch:
            history.reopen(place.epoch)  # before callbacks read it
        begin_callbacks(hooks, fit, place.step)
        with translated(OutOfMemoryError):
            return training.run(begin, evaluated=evaluated)

    saves_at = lambda position: any(hook.saves_at(position) for hook in hooks)  # noqa: E731
    go_back = lambda good_step: _saved(fit, good_step, saves_at)  # noqa: E731
    return rollback.with_rollbacks(once, start, go_back, fit.console.note, settings, history)


def _saved(fit: Fit, good_step: int, saves_at: Callable[[Position], bool]) -> RunState | None:
    """The newest good checkpoint at or before `good_step`; later ones are set aside. None without one.

    History and ledger are kept, but the number of steps left out is the checkpoint's. The bad state is freed
    leaf by leaf. Waits for a save in progress. An exact run uses only checkpoints of its schedule: one that
    was saved at a signal or at an earlier end would make the run take a different course.
    """
    report_progress(good_step, "checkpoint")
    fit.checkpointer.wait()
    group = fit.plan.group
    on_any_rank(group, "rollback: all saves have ended")
    counts = saves_at if fit.plan.settings.step.is_exact else lambda position: True
    step = rollback.newest_to_go_back_to(fit.checkpointer, good_step, counts)
    if not on_any_rank(group, "rollback: a checkpoint to go back to", step is not None):
        return None
    fit.checkpointer.rewind(good_step if step is None else step)  # acts on rank 0, which sees what it saved
    on_any_rank(group, "rollback: later checkpoints are set aside")
    bad = fit.run.state.state
    found = resume.load(fit.checkpointer, bad, fit.program.sync, group.mesh, in_place=True)
    if found is None:
        return None
    fit.run.state, then, meta = found
    fit.run.history.skipped_steps = then.skipped_steps
    fit.run.restored = fit.run.restored | {STATES: meta.get(STATES, {})}
    return fit.run.state
