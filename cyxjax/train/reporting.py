"""The run folder of a fit: its lock and mirror during training, facts for the event log, and history and
report at the end. A report that fails must not break a run."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from cyxjax.checkpoint.mirror import Mirror
from cyxjax.checkpoint.remote import RemoteRun
from cyxjax.checkpoint.run_lock import locked
from cyxjax.config.experiment import TrainConfig
from cyxjax.core.mesh import local_replicas, num_replicas
from cyxjax.core.trees import named_leaves
from cyxjax.distributed.agreement import agree, on_any_rank
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CyxjaxError
from cyxjax.files import write_whole
from cyxjax.launch.heartbeat import report_progress
from cyxjax.launch.program import code_facts, machine, provenance, software
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.devices import peak_flops, peak_memory_bytes
from cyxjax.observe.events import EventLog, Events
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink, warn_if_unwritten
from cyxjax.observe.sinks import build_sinks, sinks_named, warn_on_stderr
from cyxjax.redaction import describe
from cyxjax.run_folder import RunFolder
from cyxjax.train.plan import Plan

if TYPE_CHECKING:
    from cyxjax.observe.report.facts import Audit

OpenSink = Callable[[int], Sink]  # step that the run resumes from, 0 for a new run -> sink
_AUDITED_SAMPLES = 5_000_000  # limit of an audit at the end of a run: about a second


def event_log(folder: RunFolder, is_master: bool, warn: Callable[[str], None]) -> Events:
    """The log of the run in `folder`, on the rank that keeps it; on others, a log that keeps nothing."""
    return EventLog(folder.events, warn) if is_master else Events()


def start_facts(group: ProcessGroup, content: dict[str, Any]) -> dict[str, Any]:
    """What a start event records: world size, environment, and fingerprints of code and data."""
    first = group.mesh.local_devices[0]  # the memory of another process's device cannot be read
    devices = {
        "devices": f"{group.mesh.size} x {first.device_kind} ({first.platform})",
        "wires": group.backend,
    }
    if memory := (first.memory_stats() or {}).get("bytes_limit"):
        devices["device memory"] = f"{memory / 1e9:.1f} GB"
    prints = {**code_facts(), **{name: _digest(found) for name, found in content.items()}}
    return {
        "world_size": group.topology.world_size,
        "num_replicas": num_replicas(group.mesh),
        "environment": {**provenance(), **machine(), **devices, **software()},
        "fingerprint": prints,
    }


def flops_per_step(plan: Plan) -> float:
    """FLOP of an optimizer step over all replicas. XLA counts a loop once: those of a program are of one
    micro-batch.
    """
    return plan.step_flops() * plan.settings.step.batch.accumulation * num_replicas(plan.group.mesh)


def device_use(plan: Plan, flops_per_second: float) -> dict[str, Any]:
    """The fields of a history about device use. flops_per_second: over all replicas."""
    batch, mesh, reader = plan.settings.step.batch, plan.group.mesh, plan.data.reader
    parts = batch.accumulation * len(local_replicas(mesh))  # micro-batches of this process
    rows = reader.first.weight.size // parts if reader else batch.batch_size
    peak = peak_flops(mesh.local_devices[0].device_kind) * num_replicas(mesh)
    return {
        "flops_per_sample": plan.step_flops() / rows,
        "flops_per_second": flops_per_second,
        "mfu": flops_per_second / peak if peak else 0.0,
        "peak_memory_bytes": peak_memory_bytes(mesh.local_devices),
        "commit": provenance().get("git commit", ""),
    }


def _digest(content: Any) -> str:
    """A digest that differs between datasets."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def draw(
    folder: RunFolder, values: Mapping[str, Any], defaults: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Writes the report of a run that has ended; if that fails, prints one line.

    values and defaults: of the configuration.
    """
    from cyxjax.observe.report.facts import read_facts  # here: not needed before a run's end
    from cyxjax.observe.report.page import page

    try:
        facts = read_facts(folder, values, defaults, audit_of(folder, _AUDITED_SAMPLES))
        write_whole(folder.report, page([facts]))
    except Exception as err:  # whatever is wrong with a picture, the run is complete
        say(f"WARNING: {folder.report} was not written: {describe(err)}")


def audit_of(folder: RunFolder, most_samples: float = float("inf")) -> "Audit":
    """The verdict of `cyxjax audit`; for a run of more samples than `most_samples`, how to get it."""
    from cyxjax.observe.report.facts import Audit
    from cyxjax.train.runs.audit import examine, num_samples, records_of

    try:
        saved, kept = records_of(folder)
        if num_samples(kept) > most_samples:
            return Audit(None, [f"Not audited, because the run is long: run cyxjax audit {folder.root}"])
        verdict = examine(saved, kept)
        return Audit(not verdict.findings, [*map(str, verdict.findings), *verdict.notes, verdict.summary])
    except (CyxjaxError, OSError) as err:
        return Audit(None, [f"It could not be audited: {err}"])


def summary(params: Any) -> str:
    """One line per parameter with its shape and dtype, then the total number of parameters."""
    leaves = named_leaves(params)
    width = max((len(name) for name, _ in leaves), default=0)
    lines = [f"{name:<{width}}  {leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves]
    return "\n".join([*lines, f"{sum(leaf.size for _, leaf in leaves):,} parameters"])


def fit_into_folder(
    trainer: Any, plan: Plan, config: TrainConfig, console: Console | None
) -> DistributedTrainingHistory:
    """`trainer.fit_prepared` with the sinks, history and report of `config` in its run folder.

    Model and data come from the program: config.yaml is not written, and `cx.load_run` cannot rebuild them.
    """
    sinks_named(config.sinks)  # refuses a wrong name before anything is written
    console = console or build_console(trainer.is_master(), config.verbose)
    open_sinks = partial(sinks_of, config, plan, trainer.is_master())
    with recorded(trainer, plan, config, console, open_sinks) as (open_sink, _):
        return trainer.fit_prepared(plan, console=console, open_sink=open_sink)


def sinks_of(config: TrainConfig, plan: Plan, is_master: bool, step: int) -> Sink:
    """The sinks that `config` names, of a run that resumes from `step`; 0: a new run."""
    return build_sinks(config.sinks, config.run_dir, is_master, plan.facts.config, resume_step=step)


def fetch(config: TrainConfig, group: ProcessGroup) -> None:
    """Copies the newest good step of the mirror of rank 0 into its folder, if it is newer than those there;
    all ranks call it.

    Raises: ConfigError for a mirror that cannot be used or found; CheckpointError for one that cannot be
        read if the folder holds nothing to resume from.
    """
    mine = config.mirror if group.topology.is_master else None
    if not any(agree(group, "whether there is a mirror", note=mine is not None)):
        return
    if mine is not None:
        report_progress(-1, "checkpoint")
        resumes = config.resume != "never"
        warn_on_stderr(f"Looking for {'a run in' if resumes else 'the bucket of'} {mine}")
        if resumes:
            mirror = Mirror(mine, config.run_folder, warn_on_stderr)
            mirror.fetch(lambda: report_progress(-1, "checkpoint"))
        else:
            RemoteRun(mine).check_bucket()
    on_any_rank(group, "the mirror")


@contextmanager
def recorded(
    trainer: Any, plan: Plan, config: TrainConfig, console: Console, open_sink: OpenSink
) -> Iterator[tuple[OpenSink, list[Sink]]]:
    """Locks the run folder and copies it to its mirror; at the end, also after an error, the sink is closed
    and history and report are written.

    Yields an `open_sink` for the fit, and what it has opened: a fit that is refused before it opens its sinks
    has changed nothing.
    """
    folder, is_master = config.run_folder, trainer.is_master()
    opened: list[Sink] = []
    begins = 0
    with locked(folder.root) if is_master else nullcontext(), _mirrored(config, trainer):
        try:
            with ExitStack() as at_end:

                def open_and_close(step: int) -> Sink:
                    nonlocal begins
                    begins = step
                    opened.append(at_end.enter_context(closing(open_sink(step))))
                    return opened[-1]

                yield open_and_close, opened
        finally:
            if is_master and opened:
                with warn_if_unwritten(folder.history, console.note):
                    trainer.history.save(folder.history)
                # A run that was already over keeps its page, with the configuration that it was trained with.
                is_due = trainer.run_state.position.step > begins or not folder.report.exists()
                if plan.settings.report and is_due:
                    draw(folder, plan.facts.config, TrainConfig().resolved(), console.note)


@contextmanager
def _mirrored(config: TrainConfig, trainer: Any) -> Iterator[None]:
    """Copies the run folder in the background, and the rest at the end, waiting less after a signal or an
    error."""
    if config.mirror is None or not trainer.is_master():
        yield
        return
    mirror, is_whole = Mirror(config.mirror, config.run_folder, warn_on_stderr), False
    mirror.start()
    try:
        yield
        is_whole = not trainer.stopped_by_signal
    finally:
        mirror.end(not is_whole, lambda: report_progress(-1, "checkpoint"))
