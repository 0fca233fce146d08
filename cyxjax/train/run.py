"""One fit: what its parts need to know, how it goes, and its hooks in the order they are told."""

from typing import NamedTuple

from cyxjax.checkpoint.null import Checkpoints
from cyxjax.core import portable
from cyxjax.core.mesh import local_value, num_replicas
from cyxjax.distributed.agreement import agree
from cyxjax.errors import NotSavedError
from cyxjax.observe.console import Console
from cyxjax.observe.events import Events
from cyxjax.observe.records import Sink
from cyxjax.observe.state_digests import DigestFile
from cyxjax.observe.stop_reasons import EPOCHS, reason_of
from cyxjax.run_folder import RunFolder
from cyxjax.train import loop, out_of_memory, reporting, resume, rollback
from cyxjax.train.feeding import fit_data, places
from cyxjax.train.hooks import callbacks, composite, loss_spike
from cyxjax.train.hooks.black_box import BlackBoxHook
from cyxjax.train.hooks.callbacks import EarlyStopping, RunParts
from cyxjax.train.hooks.digests import DigestHook
from cyxjax.train.hooks.events import EventsHook
from cyxjax.train.hooks.goodput import GoodputHook
from cyxjax.train.hooks.loss_spike import LossSpikeHook
from cyxjax.train.hooks.nonfinite import TerminateOnNaN, ToldIfFlat
from cyxjax.train.hooks.profile import ProfileHook
from cyxjax.train.hooks.progress import HistoryHook, RecordHook
from cyxjax.train.hooks.saving import CheckpointHook, StopHook
from cyxjax.train.hooks.sentinel import SentinelHook
from cyxjax.train.loop import EpochInfo, Feed, Hook, Position, RunState
from cyxjax.train.monitor import Watchable, watchable_in
from cyxjax.train.program import Program
from cyxjax.train.session import Session
from cyxjax.train.settings import Course, Settings, Watch
from cyxjax.train.signals import StopSignals
from cyxjax.train.start.prepare import Prepared


class Run(NamedTuple):
    """What the hooks of one fit need to know."""

    session: Session
    program: Program
    settings: Settings
    watchable: Watchable
    signals: StopSignals
    spikes: list[LossSpikeHook]  # made once: what it has seen outlives a rollback
    checkpointer: Checkpoints
    sink: Sink
    console: Console
    events: Events  # one log: the hooks after a rollback go on in it

    @property
    def folder(self) -> RunFolder | None:
        """Where this rank records the run; None where it records nothing."""
        return self.settings.run_folder if self.session.is_master else None


def run_from(
    session: Session,
    prepared: Prepared,
    start: RunState,
    sink: Sink,
    console: Console,
    resumed: bool,
) -> tuple[RunState, NotSavedError | None]:
    """Trains what was prepared from `start` to its end, with all its hooks; the history is the session's.

    resumed: whether `start` is of a checkpoint. Returns the end, and the error if it could not be saved.
    """
    program, settings, devices = prepared.program, prepared.settings, num_replicas(session.mesh)
    assert prepared.feed is not None
    shares = settings.step.batch.num_shares
    untold = None if prepared.data is None else fit_data.untold_rows(prepared.data)
    console.batch_plan(
        batch_size=settings.step.batch.batch_size if untold is None else None,
        num_replicas=shares,
        accumulation=settings.step.batch.accumulation,
        world_size=session.group.topology.world_size,
        backend=session.group.backend,
        **({} if shares == devices else {"devices": devices}),  # of an exact run, whose replicas are virtual
        **({} if untold is None else {"first step of this process": f"{untold} samples"}),
    )
    watchable = watchable_in(session.recipe.metrics, prepared.feed, settings.course)
    keeping = resume.checkpointer_for(settings.saving, session.group, watchable.of(settings.watch).mode)
    with StopSignals() as signals, keeping as checkpointer:
        rollback.make_room(checkpointer, start.position.step, resumed, console.note)
        spikes = loss_spike.hooks_for(settings.guard, session.restored.get(loss_spike.META, {}))
        folder = settings.run_folder if settings.report else None
        events = reporting.event_log(folder, session.is_master, console.note)
        run = Run(
            *(session, program, settings, watchable, signals, spikes, checkpointer, sink, console),
            events,
        )
        course = settings.course
        console.begin(_total_steps(prepared.feed, start.position, course), course.epochs)
        try:
            end = train(run, prepared.feed, start)
        finally:
            prepared.feed.close()
            console.end()
        reason = reason_of(session.history.stopped_by)
        if end.position == start.position and reason is not EPOCHS:
            console.note(f"This run had already been stopped by {reason.note}. HINT: {reason.hint}.")
        unsaved = _unsaved(checkpointer, end.position.step)
    if session.history.stopped_by == "max_steps" and end.position.step_in_epoch:
        means = session.recipe.metrics.over_all(end.sums, "an epoch of training")
        cut_short = EpochInfo(end.position._replace(epoch=end.position.epoch + 1), means, {})
        HistoryHook(session.history, program.learning_rate).add_row(cut_short)
    session.history.skipped_steps = int(local_value(program.sync.skipped(end.state.sync)))
    return end, unsaved


def _total_steps(feed: Feed, start: Position, course: Course) -> int | None:
    """Steps of the whole run when it will have ended, as far as can be told beforehand."""
    if feed.steps_per_epoch is None:
        return course.max_steps
    ahead = (course.epochs - start.epoch) * feed.steps_per_epoch - start.step_in_epoch
    return min(start.step + ahead, course.max_steps or start.step + ahead)


def _unsaved(checkpointer: Checkpoints, step: int) -> NotSavedError | None:
    """The error that all ranks end with if the state of `step` should be on disk and is not."""
    if not resume.on_any_rank(bool(checkpointer.unsaved)):
        return None
    return NotSavedError(
        f"The final state (step {step}) could not be saved in {checkpointer.directory}, also when tried "
        f"again: {checkpointer.unsaved or 'rank 0 says why'}. HINT: free space or name another "
        "checkpoint_dir, then run the same command: it goes on from the newest step that is there."
    )


def train(run: Run, feed: Feed, start: RunState) -> RunState:
    """From `start` to the end, back to a checkpoint in between if the configuration says so."""
    settings, course = run.settings, run.settings.course

    def once(begin: RunState) -> RunState:
        with out_of_memory.explained(settings.step, num_replicas(run.session.mesh)):
            return loop.fit(
                run.program,
                feed,
                begin,
                build_hooks(run),
                epochs=course.epochs,
                in_flight=course.in_flight,
                evaluations=course.evaluations,
                max_steps=course.max_steps,
                tell=run.session.present.follow,
            )

    go_back = lambda good_step: _saved(run, start, good_step)  # noqa: E731
    return rollback.fit(once, start, go_back, run.console.note, settings.guard, run.session.history)


def _saved(run: Run, like: RunState, good_step: int) -> RunState | None:
    """The newest good checkpoint of `good_step` or before, later ones set aside; None without one.

    History and ledger stay. Waits for the save that may be under way. An exact run goes back to what its
    schedule saved: a save that a signal or the end of an earlier start made would be of another course.
    """
    run.checkpointer.wait()
    resume.meet("rollback")
    on_schedule, is_exact = _saving(run).on_schedule, run.settings.exactness.mode == "exact"
    counts = on_schedule if is_exact else lambda position: True
    step = rollback.newest_to_go_back_to(run.checkpointer, good_step, counts)
    if not resume.on_any_rank(step is not None):
        return None
    run.checkpointer.rewind(good_step if step is None else step)  # rank 0, which sees what it saved
    resume.meet("rewound")
    found = resume.load(run.checkpointer, like.state, run.program.sync, run.session.mesh)
    return None if found is None else found[0]


def build_hooks(run: Run) -> list[Hook]:
    """New hooks, which begin with the state of `run`; the user's own among them begin anew."""
    settings, history, rate = run.settings, run.session.history, run.program.learning_rate
    saves, early = _saving(run), _early_stopping(settings.watch)
    theirs, monitor = run.session.recipe.callbacks, run.watchable.of(settings.watch)
    kept = HistoryHook(history, rate)
    hooks: list[Hook] = [
        *_black_box(run),  # first: it writes before another hook ends the run
        kept,  # before all that read the history
        RecordHook(
            *(run.console, run.sink, run.session.recipe.metrics, settings.course.log_every, rate),
            total_seconds=kept.seconds,
            is_best=lambda: monitor.is_best(history),
        ),
        TerminateOnNaN(rollback.patience(settings.guard)),  # before what would take a NaN for a value
        *run.spikes,
        ToldIfFlat(tells=run.session.is_master),
        StopHook(history, run.signals.stop, settings.course.max_time_s, settings.course.max_steps),
        # After ours, whose numbers they see.
        *composite.hooks_of(theirs, history, run.session.group, run.session.hand_out),
        *early,
        *_sentinel(run, saves),  # before saving: what is saved has been compared
        *_digests(run, saves),  # before saving: a step on disk has its digests
        run.session.ledger.begin(  # is part of a save
            saves.wants_state, run.folder.ledger if run.folder else None, run.console.note
        ),
        *places.hooks_for(
            run.session.marks, run.session.group, run.session.prepared.content, saves.wants_state
        ),
        saves,  # after all whose word is part of what is saved
        *_profile(run),
        *_goodput(run),  # after saves, which are part of where the time went
        *_events(run, saves),  # last: the end is told when all is done
    ]
    callbacks.begin([*theirs, *early], RunParts(history, run.watchable, run.session.save_at))
    return hooks


def _black_box(run: Run) -> list[Hook]:
    """Only an experiment can be run again."""
    experiment, replicas = run.settings.experiment, num_replicas(run.session.mesh)
    if run.folder is None or experiment is None:
        return []
    left_out_too = not run.settings.guard.loses_steps
    return [BlackBoxHook(run.folder, experiment, run.session.ledger.tape, replicas, left_out_too)]


def _early_stopping(watch: Watch) -> list[Hook]:
    return [EarlyStopping(watch.monitor, watch.patience, mode=watch.mode)] if watch.patience else []


def _sentinel(run: Run, saves: Hook) -> list[Hook]:
    """None on one replica, which agrees with itself."""
    guard = run.settings.guard
    if num_replicas(run.session.mesh) == 1 or not guard.sentinel_every:
        return []
    return [
        SentinelHook(
            run.program.sentinel,
            [device.process_index for device in run.session.mesh.devices.flat],
            every=guard.sentinel_every,
            policy=guard.on_desync,
            saving=saves.wants_state,
            warn=run.console.note,
        )
    ]


def _digests(run: Run, saves: Hook) -> list[Hook]:
    """On all ranks of an exact experiment."""
    exactness = run.settings.exactness
    if exactness.mode == "none" or not exactness.digest_every or run.settings.run_folder is None:
        return []
    file = DigestFile(run.folder.bits, run.console.note) if run.folder else None
    return [DigestHook(run.program.sentinel, file, exactness.digest_every, saves.wants_state)]


def _saving(run: Run) -> CheckpointHook:
    saving, monitor = run.settings.saving, run.watchable.of(run.settings.watch)
    return CheckpointHook(
        run.checkpointer,
        lambda moment: run.session.describe(moment) | loss_spike.to_meta(run.spikes),
        every_epochs=saving.every_epochs,
        every_steps=saving.every_steps,
        # Clocks differ between ranks: rank 0's alone asks, and all save.
        every_minutes=saving.every_minutes if run.session.is_master else 0.0,
        metric=lambda: monitor.latest(run.session.history),
        requested=run.signals.take_save if saving.saves else lambda: _refuse_save(run),
        portable=lambda state: portable.to_portable(state, run.program.sync, run.session.mesh),
    )


def _refuse_save(run: Run) -> bool:
    if run.signals.take_save():
        run.console.note(
            "SIGUSR1 asks for a checkpoint, but they are off. HINT: checkpoint_every_n_epochs=1."
        )
    return False


def _profile(run: Run) -> list[Hook]:
    """On every rank: who is slow shows beside the others."""
    steps, folder = run.settings.profile, run.settings.run_folder
    if steps is None or folder is None:
        return []
    group = run.session.group
    own, page = folder.profile(group.topology.rank), folder.profiles if group.topology.is_master else None
    if group.topology.world_size == 1:
        return [ProfileHook(*steps, own, run.console.note)]
    share = lambda mine: agree(group, "the profile", note=mine)  # noqa: E731
    return [ProfileHook(*steps, own, run.console.note, share, page)]


def _goodput(run: Run) -> list[Hook]:
    if run.folder is None:
        return []
    return [GoodputHook(run.folder.goodput, run.session.history, run.sink, run.console.note)]


def _events(run: Run, saves: Hook) -> list[Hook]:
    """On all ranks of an experiment: at the end the group is asked who is in it."""
    if run.settings.run_folder is None or not run.settings.report:
        return []
    session = run.session
    facts = lambda: reporting.start_facts(session.group, session.prepared.content)  # noqa: E731
    return [EventsHook(run.events, facts, lambda: reporting.ask_ranks(session.group), saves.wants_state)]
