"""An experiment: built from its configuration, trained, and recorded in a run folder."""

import math
import shlex
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from cyxjax.checkpoint.folders import list_steps
from cyxjax.config.errors import blamed
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import open_run
from cyxjax.core.metrics import numbers
from cyxjax.data.catalog import splits_of
from cyxjax.data.splits import DatasetInfo, Splits
from cyxjax.distributed import process_group
from cyxjax.errors import EXIT_OK, CheckpointError, CyxjaxError, NotSavedError
from cyxjax.files import read_plain
from cyxjax.launch.backend import programs
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import done_line, line_of_test
from cyxjax.observe.records import Sink, write_atomic
from cyxjax.observe.sinks import sinks_named, warn_on_stderr
from cyxjax.observe.stop_reasons import MAX_TIME, reason_of
from cyxjax.train import reporting
from cyxjax.train.plan import Plan
from cyxjax.train.reporting import fetch, recorded, sinks_of
from cyxjax.train.runs.tables import check_columns, check_vocabulary
from cyxjax.train.start.named import (
    augment_of,
    callbacks_of,
    loss_of,
    metrics_of,
    model_of,
    optimizer_of,
)
from cyxjax.train.trainer import DistributedTrainer


class Experiment(NamedTuple):
    """An experiment that is ready to train."""

    config: TrainConfig
    splits: Splits
    trainer: DistributedTrainer
    plan: Plan


def run(config: TrainConfig) -> int:
    """Trains as `config` says and returns the exit code."""
    return train(prepare(config, goes_on=True))


def train(experiment: Experiment) -> int:
    """Trains, evaluates on the test samples unless a signal ended the training, and returns the exit code."""
    config, _, trainer, plan = experiment
    console = build_console(trainer.is_master(), config.verbose)
    unsaved = None
    begin = partial(_begin_folder, experiment)
    with recorded(trainer, plan, config, console, begin) as (open_sink, opened):
        try:
            trainer.fit_prepared(plan, console=console, open_sink=open_sink)
        except NotSavedError as error:
            unsaved = error
        history = trainer.history
        if reason_of(history.stopped_by).exit_code == EXIT_OK:
            _test(experiment, opened, console)
    console.note(done_line(history, str(config.run_folder.root)), style="green")
    _say_how_to_go_on(config, history, console)
    if unsaved is None and not config.fast_dev_run:
        saving = plan.settings.saving
        console.note(_next_commands(config, history, saving.saves and saving.resume != "never"))
    process_group.finalize()
    if unsaved is not None:
        raise unsaved  # last, after the results above are printed
    return reason_of(history.stopped_by).exit_code


def _begin_folder(experiment: Experiment, step: int) -> Sink:
    """Writes the first files of a run that begins at `step`, if it is to be trained, and opens its sinks.

    Called after the step is known: a run that is refused has changed nothing.
    """
    config, splits, trainer, plan = experiment
    try:
        if step and config.run_folder.data.exists():
            path, trained_on = config.data.root or config.run_dir, stored_info(config)
            check_columns(path, splits.info.column_names, trained_on.column_names)
            check_vocabulary(path, splits.info.vocabulary, trained_on.vocabulary)
        if trainer.is_master() and trainer.run_state.position.epoch < config.epochs:
            if not step and config.resume != "never":
                _warn_of_starting_over(config)
            write_atomic(config.run_folder.data, splits.info.to_json())
            write_atomic(config.run_folder.config, config.to_yaml())  # last: with `data` it is a run's own
        return sinks_of(config, plan, trainer.is_master(), step)
    except OSError as err:  # nothing was trained yet
        raise CheckpointError(
            f"run_dir={config.run_dir}: {f'{err.filename}: ' if err.filename else ''}{err.strerror or err}. "
            "HINT: free space there, or name another run_dir."
        ) from err


def _warn_of_starting_over(config: TrainConfig) -> None:
    """Warns if this run starts over although its folder's earlier run was trained: its checkpoints are in
    another folder, or gone.
    """
    why = (
        f"WARNING: run_dir={config.run_dir}: this run starts over, because {config.checkpoint_path} holds no "
    )
    with suppress(CyxjaxError):  # a stored configuration that cannot be read is replaced
        stored, here = open_run(config.run_folder.root), config.checkpoint_path.resolve()
        history, steps = config.run_folder.history, 0
        if history.is_file():
            steps = DistributedTrainingHistory.load(history).num_steps
        if stored.checkpoints.resolve() != here and list_steps(stored.checkpoints):
            warn_on_stderr(
                f"{why}checkpoint. HINT: to continue the earlier run in this folder: --checkpoint-dir "
                f"{stored.checkpoint_dir}"
            )
        elif steps:
            warn_on_stderr(
                f"{why}checkpoint of the {steps} steps of the earlier run. HINT: to continue that run, stop "
                "this one and bring its checkpoints back; its records are kept as *.old."
            )


def _test(experiment: Experiment, opened: list[Sink], console: Console) -> None:
    """Evaluates on the test samples; the results go to the console and the sinks, outputs to the report.

    opened: the sinks of this run; none where it ended before it opened them.
    """
    config, splits, trainer, _ = experiment
    found = numbers(trainer.evaluate_metrics(splits.test, max_batches=config.max_eval_batches))
    console.note(line_of_test(found))
    step = trainer.history.num_steps
    results = {f"test_{name}": value for name, value in found.items() if not math.isnan(value)}
    for sink in opened:
        sink.log({"kind": "test", "step": step, **results})
    if config.report:
        from cyxjax.train.feeding import samples  # here: not needed before a run's end

        events = reporting.event_log(config.run_folder, trainer.is_master(), console.note)
        events.log("test", step=step, metrics=found)
        ignored = getattr(trainer.loss_fn, "ignore_index", None)
        samples.log_samples(splits, config.report_samples, trainer.predict, events, console.note, ignored)


def _say_how_to_go_on(config: TrainConfig, history: DistributedTrainingHistory, console: Console) -> None:
    reason = reason_of(history.stopped_by)
    if reason is not MAX_TIME and reason.exit_code == EXIT_OK:
        return
    saved = max(list_steps(config.checkpoint_path), default=0)
    if config.resume == "never" or saved < history.num_steps:
        console.note(f"Stopped after step {history.num_steps}; the newest checkpoint is of step {saved}.")
    else:
        console.note(f"Stopped and saved after step {saved}. Run the same command again to continue.")


def _next_commands(config: TrainConfig, history: DistributedTrainingHistory, resumes: bool) -> str:
    """A line with the commands to run next. resumes: whether the same command continues this run."""
    folder, page = shlex.quote(config.run_dir), shlex.quote(str(config.run_folder.report))
    look = f"open {page}" if config.report else f"cyxjax report {folder}"
    kept = config.run_folder.ledger.is_file()  # a stream has none
    audit = f"; cyxjax audit {folder}" if kept else ""
    again = f"; {reason_of(history.stopped_by).hint}" if resumes else ""
    return f"Next: {look}{audit}{again}."


def prepare(config: TrainConfig, *, goes_on: bool = False, step: int | None = None) -> Experiment:
    """The data, and an untrained trainer in its group, checked against each other; nothing is written.

    goes_on: whether it will be trained; the newest step of the run's mirror, if any, is then copied here.
    step: one of its checkpoints, which the trainer loads first: the plan is that of a run from there.
    Raises: ConfigError, DataError, CheckpointError.
    """
    with blamed(config):
        config.run_folder.refuse_unusable()
        config.run_folder.refuse_to_replace_config()
        process_group.init(cpu_devices=config.cpu_devices, threads=config.pool_threads)
        programs.keep(config.compile_cache, tell=process_group.is_master())
        sinks_named(config.sinks)  # refuses a wrong name before anything is read or written
        if goes_on:
            _warn_of_no_momentum(config)
            fetch(config, process_group.current())
        splits = data_of(config)
        trainer = trainer_of(config, splits.info)
        if step is not None:
            trainer.load_checkpoint(str(config.checkpoint_path), step)
        plan = trainer.prepare(splits.train, splits.val, config=config, named=True)
        return Experiment(config, splits, trainer, plan)


def _warn_of_no_momentum(config: TrainConfig) -> None:
    """Warns if a momentum was given to `sgd`, which has none; with torch's names it would have one."""
    given = config.optimizer.model_fields_set & {"momentum", "nesterov"}
    if config.optimizer.name == "sgd" and given and process_group.is_master():
        keys = " and ".join(sorted(given))
        warn_on_stderr(f"WARNING: optimizer.name=sgd has no {keys}. HINT: optimizer.name=momentum.")


def data_of(config: TrainConfig) -> Splits:
    """Train, validation and test samples. Raises: ConfigError, DataError."""
    with blamed(config, "data"):
        return splits_of(config.data.name, config.data.root, config.data.options)


def trainer_of(config: TrainConfig, info: DatasetInfo) -> DistributedTrainer:
    """An untrained trainer of what `config` names, for data as in `info`. Raises: ConfigError."""
    loss = loss_of(config.loss, config.model.name, info)
    with blamed(config, "model"):
        model = model_of(config.model, info, config.seed)
    with blamed(config, "optimizer"):
        optimizer = optimizer_of(config.optimizer, loss)
    trainer = DistributedTrainer(
        model,
        loss,
        optimizer,
        metrics=metrics_of(config.metrics, info, loss),
        callbacks=callbacks_of(config.callbacks),
        augment=augment_of(config.data),
    )
    trainer.class_names = info.class_names
    return trainer


def stored_info(config: TrainConfig) -> DatasetInfo:
    """Facts of the data that the model was made for, as stored in the run folder."""
    return DatasetInfo.from_json(read_plain(config.run_folder.data, 1 << 24).decode())
