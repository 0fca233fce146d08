"""The hooks of a run, in the order in which they are called."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cyxjax.checkpoint.checkpointer import Checkpoints
from cyxjax.core import portable
from cyxjax.core.mesh import num_replicas
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.launch import save_request
from cyxjax.observe.console import Console
from cyxjax.observe.records import Sink
from cyxjax.run_folder import RunFolder
from cyxjax.train import reporting, resume, rollback
from cyxjax.train.feeding.stream_positions import StreamPositions
from cyxjax.train.hooks import all_callbacks
from cyxjax.train.hooks.bad_steps import LossSpikeHook, TerminateOnNaN
from cyxjax.train.hooks.black_box import BlackBoxHook
from cyxjax.train.hooks.callbacks import EarlyStopping, RunParts
from cyxjax.train.hooks.goodput import GoodputHook
from cyxjax.train.hooks.hook import Hook, RunState, overriding
from cyxjax.train.hooks.ledger import LedgerHook
from cyxjax.train.hooks.profile import ProfileHook
from cyxjax.train.hooks.progress import EventsHook, HistoryHook, RecordHook
from cyxjax.train.hooks.saving import CheckpointHook, HandOutHook, StopHook
from cyxjax.train.hooks.sentinel import DigestHook, SentinelHook
from cyxjax.train.monitor import Watchable
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.run_state import Run
from cyxjax.train.settings import GuardPolicy, Watch
from cyxjax.train.signals import StopSignals


class Fit(NamedTuple):
    """A run and what is open during its fit, from which its hooks are made."""

    plan: Plan
    program: Program
    run: Run
    watchable: Watchable
    signals: StopSignals
    checkpointer: Checkpoints
    sink: Sink
    console: Console
    starts_over: bool  # whether an earlier run in the same folder is over, also one that was interrupted
    hand_out: Callable[[], None] | None  # copies the current values into a model that holds values

    @property
    def folder(self) -> RunFolder | None:
        """Where this rank records the run; None where it records nothing."""
        return self.plan.settings.run_folder if self.plan.group.topology.is_master else None

    @property
    def max_steps(self) -> int | None:
        """The step after which the run ends: `max_steps` counts from where its optimizer began."""
        most = self.plan.settings.course.max_steps
        return None if most is None else self.run.first_step + most

    def learning_rate(self, step: int) -> float | None:
        """The learning rate of the newest update; None if it is not known.

        step: the number of steps so far. Those that were left out made no update.
        """
        return self.program.learning_rate(step - self.run.first_step - self.run.history.skipped_steps)


def build_hooks(fit: Fit) -> list[Hook]:
    """The hooks of a fit. They outlive a rollback: `on_start` gives them the state to continue from."""
    settings, history = fit.plan.settings, fit.run.history
    monitor, course = fit.watchable.of(settings.watch), settings.course
    recorded = HistoryHook(history, fit.learning_rate)
    return [
        *_black_box(fit),  # first: it writes before another hook ends the run
        recorded,  # before all that read the history
        RecordHook(
            *(fit.console, fit.sink, fit.plan.recipe.metrics, course.log_every, fit.learning_rate),
            total_seconds=recorded.seconds,
            best=lambda: monitor.name if monitor.is_best(history) else "",
        ),
        TerminateOnNaN(rollback.patience(settings.step)),  # before what would take a NaN for a value
        *_loss_spikes(settings.guard),
        StopHook(history, fit.signals.reason, course.max_time_s, fit.max_steps),
        # After our own hooks, whose numbers they see.
        *_hand_out(fit),
        *sorted(fit.plan.recipe.callbacks, key=lambda one: not overriding([one], "next_state")),
        *_early_stopping(settings.watch),
        *_sentinel(fit),  # before saving: what is saved has been compared
        *_digests(fit),  # before saving: a step on disk has its digests
        fit.run.ledger.begin(  # part of a save
            fit.plan.group,
            fit.folder.ledger if fit.folder else None,
            fit.console.note,
            resumed=bool(fit.run.restored),
            starts_over=fit.starts_over,
        ),
        *([] if fit.plan.data.indexed else [fit.run.stream_positions]),  # part of a save
        _saving(fit),  # after all hooks that add to what is saved
        *_profile(fit),
        *_goodput(fit),  # after saves, whose time it counts
        *_events(fit),  # last: the end is logged when all is done
    ]


def begin_callbacks(hooks: list[Hook], fit: Fit, step: int) -> None:
    """Begins the callbacks among `hooks`, before each start: of the fit, and after a rollback to `step`."""
    gathering = [hook for hook in hooks if isinstance(hook, LedgerHook | StreamPositions)]
    settings = fit.plan.settings
    root = settings.run_folder.root if settings.run_folder and settings.experiment else Path()

    def save(path: str, moment: RunState) -> None:
        for hook in gathering:
            hook.on_state(moment)
        resume.save_at(root / path, fit.plan, fit.program, fit.run, moment)

    all_callbacks.begin(hooks, RunParts(fit.run.history, step, fit.watchable, save))
    all_callbacks.load_states(hooks, fit.run.restored.get(all_callbacks.STATES, {}))


def _black_box(fit: Fit) -> list[Hook]:
    """Only for an experiment: nothing else can be run again."""
    experiment = fit.plan.settings.experiment
    if fit.folder is None or experiment is None:
        return []
    return [
        BlackBoxHook(
            fit.folder,
            experiment,
            fit.plan.feed.tape.facts,
            num_replicas(fit.plan.group.mesh),
            left_out_too=not fit.plan.settings.step.uses_float16,
            note=fit.console.note,
        )
    ]


def _loss_spikes(guard: GuardPolicy) -> list[Hook]:
    if guard.on_loss_spike == "ignore":
        return []
    return [LossSpikeHook(guard.spike_factor, guard.spike_window, guard.spike_steps)]


def _hand_out(fit: Fit) -> list[Hook]:
    """On all ranks if one has callbacks of the user: our own do not read values from the model."""
    own = any(not type(one).__module__.startswith("cyxjax.") for one in fit.plan.recipe.callbacks)
    if fit.hand_out is None or not on_any_rank(fit.plan.group, "callbacks of your own", own):
        return []
    return [HandOutHook(fit.hand_out)]


def _early_stopping(watch: Watch) -> list[Hook]:
    return [EarlyStopping(watch.patience, watch.monitor, mode=watch.mode)] if watch.patience else []


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
    settings, every = fit.plan.settings, fit.plan.settings.guard.digest_every
    if not (settings.step.is_exact and every and settings.run_folder):
        return []
    path = fit.folder.bits if fit.folder else None
    return [DigestHook(fit.program.sentinel, path, every, fit.console.note)]


def _saving(fit: Fit) -> CheckpointHook:
    saving, monitor = fit.plan.settings.saving, fit.watchable.of(fit.plan.settings.watch)
    return CheckpointHook(
        fit.checkpointer,
        partial(resume.to_meta, fit.plan, fit.run),
        saving,
        measured=monitor.of,
        requested=save_request.take if saving.saves else lambda: _refuse_save(fit),
        portable=lambda state: portable.to_portable(state, fit.program.sync, fit.plan.group.mesh),
    )


def _refuse_save(fit: Fit) -> bool:
    if save_request.take():
        fit.console.note(
            "SIGUSR1 asks for a checkpoint, but checkpoints are off. HINT: set checkpoint_every_n_epochs=1."
        )
    return False


def _profile(fit: Fit) -> list[Hook]:
    steps, folder = fit.plan.settings.profile, fit.plan.settings.run_folder
    if not steps or folder is None:
        return []
    return [
        ProfileHook(steps.start, steps.stop, folder.profile(fit.plan.group.topology.rank), fit.console.note)
    ]


def _goodput(fit: Fit) -> list[Hook]:
    if fit.folder is None:
        return []
    return [
        GoodputHook(
            fit.folder.goodput,
            fit.run.history,
            fit.sink,
            fit.console.note,
            flops_per_step=partial(reporting.flops_per_step, fit.plan),
            use=partial(reporting.device_use, fit.plan),
            starts_over=fit.starts_over,
        )
    ]


def _events(fit: Fit) -> list[Hook]:
    """On all ranks of an experiment: all must ask for the same states."""
    plan = fit.plan
    if plan.settings.run_folder is None or not plan.settings.report:
        return []
    events = reporting.event_log(plan.settings.run_folder, plan.group.topology.is_master, fit.console.note)
    facts = lambda: reporting.start_facts(plan.group, plan.facts.data)  # noqa: E731
    return [EventsHook(events, facts, fit.starts_over)]
