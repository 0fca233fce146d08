"""The hooks of a run, in the order in which they are called."""

from collections.abc import Callable
from typing import NamedTuple

from cyxjax.checkpoint.checkpointer import Checkpoints
from cyxjax.core import portable
from cyxjax.core.mesh import num_replicas
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.observe.console import Console
from cyxjax.observe.events import Events
from cyxjax.observe.records import Sink
from cyxjax.run_folder import RunFolder
from cyxjax.train import reporting, resume, rollback
from cyxjax.train.feeding import stream_positions
from cyxjax.train.hooks import all_callbacks
from cyxjax.train.hooks.bad_steps import LossSpikeHook, TerminateOnNaN, loss_spike_meta
from cyxjax.train.hooks.black_box import BlackBoxHook
from cyxjax.train.hooks.callbacks import EarlyStopping, RunParts
from cyxjax.train.hooks.goodput import GoodputHook
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.hooks.profile import ProfileHook
from cyxjax.train.hooks.progress import EventsHook, HistoryHook, RecordHook
from cyxjax.train.hooks.saving import CheckpointHook, HandOutHook, StopHook
from cyxjax.train.hooks.sentinel import DigestHook, SentinelHook
from cyxjax.train.monitor import Watchable
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.run_state import Run
from cyxjax.train.settings import Watch
from cyxjax.train.signals import StopSignals


class Fit(NamedTuple):
    """A run and what is open during its fit, from which its hooks are made."""

    plan: Plan
    program: Program
    run: Run
    watchable: Watchable
    signals: StopSignals
    spikes: list[LossSpikeHook]  # created once: what they have seen outlives a rollback
    checkpointer: Checkpoints
    sink: Sink
    console: Console
    events: Events  # one log: hooks built after a rollback continue it
    hand_out: Callable[[], None] | None  # copies the current values into a model that holds values

    @property
    def folder(self) -> RunFolder | None:
        """Where this rank records the run; None where it records nothing."""
        return self.plan.settings.run_folder if self.plan.group.topology.is_master else None


class Timed(NamedTuple):
    """The hooks that measure time: created once, because time continues across a rollback."""

    history: HistoryHook
    stop: StopHook
    profile: list[Hook]
    goodput: list[Hook]


def timed_hooks(fit: Fit) -> Timed:
    """The hooks that measure time, from now on."""
    course, history = fit.plan.settings.course, fit.run.history
    return Timed(
        HistoryHook(history, fit.program.learning_rate),
        StopHook(history, fit.signals.reason, course.max_time_s, course.max_steps),
        _profile(fit),
        _goodput(fit),
    )


def build_hooks(fit: Fit, timed: Timed, step: int) -> list[Hook]:
    """New hooks, which begin with the state of the run at `step`; the user's callbacks start over."""
    settings, history, rate = fit.plan.settings, fit.run.history, fit.program.learning_rate
    early = _early_stopping(settings.watch)
    theirs, monitor = fit.plan.recipe.callbacks, fit.watchable.of(settings.watch)
    hooks: list[Hook] = [
        *_black_box(fit),  # first: it writes before another hook ends the run
        timed.history,  # before all that read the history
        RecordHook(
            *(fit.console, fit.sink, fit.plan.recipe.metrics, settings.course.log_every, rate),
            total_seconds=timed.history.seconds,
            is_best=lambda: monitor.is_best(history),
        ),
        TerminateOnNaN(rollback.patience(settings.step)),  # before what would take a NaN for a value
        *fit.spikes,
        timed.stop,
        # After our own hooks, whose numbers they see.
        *_hand_out(fit),
        *theirs,
        *early,
        *_sentinel(fit),  # before saving: what is saved has been compared
        *_digests(fit),  # before saving: a step on disk has its digests
        fit.run.ledger.begin(  # part of a save
            fit.plan.group, fit.folder.ledger if fit.folder else None, fit.console.note
        ),
        *stream_positions.hooks_for(fit.run.stream_positions, fit.plan.group, fit.plan.facts.data),
        saving_hook(fit),  # after all hooks that add to what is saved
        *timed.profile,
        *timed.goodput,  # after saves, whose time it counts
        *_events(fit),  # last: the end is logged when all is done
    ]
    save = lambda path, moment: resume.save_at(path, fit.plan, fit.program, fit.run, moment)  # noqa: E731
    all_callbacks.begin([*theirs, *early], RunParts(history, step, fit.watchable, save))
    return hooks


def _black_box(fit: Fit) -> list[Hook]:
    """Only for an experiment: nothing else can be run again."""
    experiment, replicas = fit.plan.settings.experiment, num_replicas(fit.plan.group.mesh)
    if fit.folder is None or experiment is None:
        return []
    left_out_too = not fit.plan.settings.step.uses_float16
    tape, note = fit.run.ledger.tape, fit.console.note
    return [BlackBoxHook(fit.folder, experiment, tape, replicas, left_out_too, note)]


def _hand_out(fit: Fit) -> list[Hook]:
    """On all ranks if one has callbacks of the user: our own do not read values from the model."""
    own = any(not type(one).__module__.startswith("cyxjax.") for one in fit.plan.recipe.callbacks)
    if fit.hand_out is None or not on_any_rank(fit.plan.group, "callbacks of your own", own):
        return []
    return [HandOutHook(fit.hand_out)]


def _early_stopping(watch: Watch) -> list[Hook]:
    return [EarlyStopping(watch.monitor, watch.patience, mode=watch.mode)] if watch.patience else []


def _sentinel(fit: Fit) -> list[Hook]:
    """No hook for a single replica, which has no other to compare with."""
    guard = fit.plan.settings.guard
    if num_replicas(fit.plan.group.mesh) == 1 or not guard.sentinel_every:
        return []
    return [
        SentinelHook(
            fit.program.sentinel,
            [device.process_index for device in fit.plan.group.mesh.devices.flat],
            every=guard.sentinel_every,
            policy=guard.on_desync,
            warn=fit.console.note,
        )
    ]


def _digests(fit: Fit) -> list[Hook]:
    """On all ranks of an exact experiment."""
    settings, every = fit.plan.settings, fit.plan.settings.exactness.digest_every
    if not (settings.step.is_exact and every and settings.run_folder):
        return []
    path = fit.folder.bits if fit.folder else None
    return [DigestHook(fit.program.sentinel, path, every, fit.console.note)]


def saving_hook(fit: Fit) -> CheckpointHook:
    saving, monitor = fit.plan.settings.saving, fit.watchable.of(fit.plan.settings.watch)
    return CheckpointHook(
        fit.checkpointer,
        lambda moment: resume.to_meta(fit.plan, fit.run, moment) | loss_spike_meta(fit.spikes),
        every_epochs=saving.every_epochs,
        every_steps=saving.every_steps,
        every_minutes=saving.every_minutes,  # each rank asks by its own clock; when one asks, all save
        measured=monitor.of,
        requested=fit.signals.take_save if saving.saves else lambda: _refuse_save(fit),
        portable=lambda state: portable.to_portable(state, fit.program.sync, fit.plan.group.mesh),
    )


def _refuse_save(fit: Fit) -> bool:
    if fit.signals.take_save():
        fit.console.note(
            "SIGUSR1 asks for a checkpoint, but checkpoints are off. HINT: set checkpoint_every_n_epochs=1."
        )
    return False


def _profile(fit: Fit) -> list[Hook]:
    steps, folder = fit.plan.settings.profile, fit.plan.settings.run_folder
    if steps is None or folder is None:
        return []
    return [ProfileHook(*steps, folder.profile(fit.plan.group.topology.rank), fit.console.note)]


def _goodput(fit: Fit) -> list[Hook]:
    if fit.folder is None:
        return []
    batch, mesh = fit.plan.settings.step.batch, fit.plan.group.mesh
    use = lambda steps_per_s: reporting.device_use(fit.plan.step_flops(), batch, mesh, steps_per_s)  # noqa: E731
    return [GoodputHook(fit.folder.goodput, fit.run.history, fit.sink, fit.console.note, use)]


def _events(fit: Fit) -> list[Hook]:
    """On all ranks of an experiment: all must ask for the same states."""
    if fit.plan.settings.run_folder is None or not fit.plan.settings.report:
        return []
    plan = fit.plan
    facts = lambda: reporting.start_facts(plan.group, plan.facts.data)  # noqa: E731
    return [EventsHook(fit.events, facts)]
