"""`DistributedTrainer`: the public interface of training. It passes values on; the core computes."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import optax

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.metrics import Metrics
from cyxjax.core.step import TrainState
from cyxjax.core.trees import PyTree
from cyxjax.distributed import process_group
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.distributed.model_sync import ModelSync
from cyxjax.launch.backend import pages, programs
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink
from cyxjax.observe.sinks import NullSink
from cyxjax.observe.stop_reasons import INTERRUPT, SIGNAL, reason_of
from cyxjax.train import between_fits, reporting, resume
from cyxjax.train.checks import order as checks
from cyxjax.train.comparison import compare_samples
from cyxjax.train.feeding import argument_pairs, fit_data
from cyxjax.train.feeding.predicting import source_of
from cyxjax.train.hooks.hook import Hook, RunState
from cyxjax.train.plan import Plan, fit_arguments, own_checkpoint, plan_fit, plan_without_data
from cyxjax.train.program import Program, recipe_of
from cyxjax.train.run import run_fit, saved_by_one_job, say_all_done
from cyxjax.train.run_state import Run
from cyxjax.train.schedules import schedule_of
from cyxjax.train.signals import end_program_if_stopped


class DistributedTrainer:
    """Trains a Flax model on every device of every process, as if on one device with the whole batch.

    model: a linen or nnx module, an (init, apply) or (variables, apply) pair, or a SequentialModel.
    loss_fn: a cyxjax loss, a function (output, target) -> one value per example (or a mean), a `cx.Task`, or
    None if the model returns {"loss": ...}. optimizer: any optax transformation; None if each term of a Task
    has its own. Both may also be names from a configuration file: "cross_entropy", "adam". metrics: a
    `cx.Metrics`, or functions by name. augment: functions (key, x) -> x for one training sample's inputs.
    Creates the process group if there is none.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Any = None,
        optimizer: optax.GradientTransformation | str | None = None,
        *,
        metrics: Metrics | Mapping[str, Any] | None = None,
        callbacks: Iterable[Hook] = (),
        augment: Any = None,
    ):
        self._recipe = recipe_of(model, loss_fn, optimizer, metrics, callbacks, augment)
        self._model, self._loss_fn, self._metrics = model, loss_fn, metrics
        self._model_sync = ModelSync(model)
        self._group = process_group.ensure()
        self._run = Run()

    # The constructor's arguments. They are read-only: steps are compiled from them.
    model = property(attrgetter("_model"))
    loss_fn = property(attrgetter("_loss_fn"))
    optimizer = property(attrgetter("_recipe.optimizer"))
    metrics = property(attrgetter("_metrics"))
    callbacks = property(attrgetter("_recipe.callbacks"))
    augment = property(attrgetter("_recipe.augment"))
    recipe = property(attrgetter("_recipe"))

    def fit(
        self,
        *data: Any,
        config: DistributedTrainingConfig | None = None,
        validation_data: Any = None,
        schedule: Any = None,
        lr_schedule: Any = None,
        ckpt_path: str | None = None,
        console: Console | None = None,
        **settings: Any,
    ) -> DistributedTrainingHistory:
        """Trains and returns the history: fit(X, y, config), fit(X, y, X_val, y_val, config),
        fit(dataset, val_dataset, config) or fit(loader, val_loader, config).

        Configuration keys may be passed as keywords: fit(X, y, epochs=3, batch_size=32), and validation data
        as validation_data=(X_val, y_val). schedule: a function of the optimizer steps done after the warm-up
        that returns a factor on the optimizer's learning rate; lr_schedule: one that returns the rate itself.
        ckpt_path: see `load_checkpoint`; not read if the run resumes from its own checkpoint. run_dir: a
        folder for metrics, history, checkpoints and a report; sinks: see `TrainConfig`. A second call
        continues from the trained parameters with a new optimizer state, also after an error; with
        `config.resume`, an interrupted run from its newest good checkpoint. Ctrl-C: returns the history.
        Raises: ConfigError and DataError before anything is written; CheckpointError if no checkpoint to
        resume from is good; NotSavedError after training, with the trained parameters in place, if they
        could not be saved; SystemExit(143) after SIGTERM, once the state is saved.
        """
        data, config = fit_arguments(data, config, validation_data, settings)
        if isinstance(config, TrainConfig):
            reporting.fetch(config, self._group)  # before a checkpoint to resume from is looked for
        schedule = schedule_of(schedule, lr_schedule, self.recipe.optimizer)
        plan = self.prepare(*data, config=config, schedule=schedule, ckpt_path=ckpt_path)
        if isinstance(config, TrainConfig):
            history = reporting.fit_into_folder(self, plan, config, console)
        else:
            history = self.fit_prepared(plan, console=console)
        end_program_if_stopped(history, prints=self.is_master())
        return history

    def prepare(
        self,
        *data: Any,
        config: DistributedTrainingConfig,
        schedule: Any = None,
        ckpt_path: str | None = None,
        named: bool = False,
    ) -> Plan:
        """Returns the plan that `fit` makes before it writes or trains anything, for `fit_prepared`.
        schedule: None for that of `config`. ckpt_path: see `fit`. named: whether `config` names the model.
        Raises: ConfigError and DataError if data, model and configuration do not match."""
        self._model_sync.refuse_changed_parameters()
        self._run.refuse_in_fit("fit")
        programs.keep(config.compile_cache, tell=self.is_master())
        pages.use(config.memory_pages, self._group.topology.local_world_size)
        run = self._run
        own = None if run.is_loaded else own_checkpoint(config, self._group)
        if own is None and ckpt_path is not None:
            self.load_checkpoint(ckpt_path)
        loaded = run.restored if run.is_loaded else {}
        plan = plan_fit(self._recipe, self._group, data, config, own, loaded, schedule=schedule, named=named)
        run.ledger.tape = plan.feed.tape
        run.stream_positions.begin(self._group, fit_data.is_shared(plan.data.train), run.is_loaded)
        plan = checks.before_training(plan, lambda: run.begin(plan), loaded=run.is_loaded)
        run.last = plan, self.program
        return plan

    def fit_prepared(
        self,
        plan: Plan,
        *,
        console: Console | None = None,
        open_sink: Callable[[int], Sink] = lambda step: NullSink(),
    ) -> DistributedTrainingHistory:
        """Trains a plan of `prepare`, usable once; see `fit`. The caller closes the sink that is opened."""
        run, program, epochs = self._run, self.program, plan.settings.course.epochs
        console = console or build_console(self.is_master(), plan.settings.verbose)
        with saved_by_one_job(plan), run.fitting(plan.feed):
            start, resumed = resume.start(plan, program, run, console)
            hand_out = self._hand_out_values if self._model_sync.holds_values else None
            if start.position.epoch >= epochs:
                say_all_done(plan, run, console)
                if not resumed:  # loaded from elsewhere: the run in this folder stays unchanged
                    return run.history
            sink = open_sink(start.position.step if resumed else 0)
            unsaved = run_fit(plan, program, run, start, sink, console, resumed=resumed, hand_out=hand_out)
        self._hand_out_values()
        if unsaved is not None:
            raise unsaved
        return run.history

    def evaluate(self, X: Any, y: Any = None, *, batch_size: int | None = None) -> tuple[float, float]:
        """Returns (loss, accuracy) over all samples, each counted once; the same at every world size, but for
        losses of a whole batch (`GlobalLoss`). Accuracy is NaN where it is not defined (regression)."""
        means = self.evaluate_metrics(X, y, batch_size=batch_size)
        return means["loss"], means["accuracy"]

    def evaluate_metrics(
        self, X: Any, y: Any = None, *, batch_size: int | None = None, max_batches: int | None = None
    ) -> dict[str, Any]:
        """Returns all metrics by name: numbers, or an array for a confusion matrix. The data are as in
        `evaluate`, or a loader. max_batches: the most batches to evaluate; a stream's have 256 samples per
        process. Every rank passes the same samples, or a loader of its share.
        Raises: DesyncError if samples differ.
        """
        dataset = fit_data.for_evaluation(argument_pairs.paired(X, y))
        compare_samples(self._group, "evaluate", dataset)
        samples = fit_data.unsplit(dataset)
        self._begin_untrained("evaluate", fit_data.one_sample(samples)[0])
        return between_fits.evaluate(self._run, samples, batch_size, max_batches)

    def predict(self, X: PyTree, *, batch_size: int | None = None) -> PyTree:
        """Returns the model's outputs for X in evaluation mode, on every rank: NumPy, one row per sample.

        X: inputs as arrays, a dataset or a loader; targets in it are ignored.
        Raises: DesyncError unless every rank passes the same X.
        """
        source = source_of(X, self._run.last and self._run.last[0].inputs)
        compare_samples(self._group, "predict", source.compared)
        self._begin_untrained("predict", source.first)
        return between_fits.predict(self._run, source, batch_size)

    def _begin_untrained(self, call: str, inputs: PyTree) -> None:
        """Makes plan, program and state for one sample's `inputs`, if nothing was trained or loaded."""
        self._model_sync.refuse_changed_parameters()
        if self._run.last is None:
            self._run.begin(plan_without_data(self._recipe, self._group, inputs))
        self._run.warn_if_untrained(call)

    def save_checkpoint(self, path: str) -> None:
        """Saves everything that the next step depends on in the folder `path`, and deletes the older steps
        there but for the best, also those of a run (`./checkpoints`). Rank 0 writes; all ranks must call it
        where each keeps a part of the state (zero1, ...). Raises: CheckpointError if it cannot be written,
        ConfigError for a callback's state that it cannot hold."""
        resume.save_at(path, self.plan, self.program, self._run, self.run_state)

    def load_checkpoint(self, path: str, step: int | None = None) -> None:
        """Restores what `save_checkpoint` (or a run) saved in `path`: its newest good step, or `step`.
        The next `fit` continues from that step, up to `epochs` in total.
        Raises: CheckpointError if there is no checkpoint, or if it belongs to a different model.
        """
        self._run.refuse_in_fit("load_checkpoint")  # first: a single rank would wait below
        on_any_rank(self._group, "load_checkpoint")  # a peer may still be writing what is read here
        between_fits.load(self._run, path, step, self._recipe, self._group)
        self._hand_out_values()

    validate = test = evaluate_metrics
    """`evaluate_metrics` under Lightning's names."""
    save = save_checkpoint
    """`save_checkpoint` under Keras's name."""

    def summary(self) -> str:
        """One line per parameter with its shape, then the total count. Raises: GroupError before a fit."""
        return reporting.summary(self.params)

    def enable_gradient_checkpointing(self, policy: str = "full") -> None:
        """Recomputes activations in the backward pass from the next fit on: less memory, more time."""
        self._recipe = self._recipe._replace(remat=policy)

    def is_master(self) -> bool:
        return self._group.topology.is_master

    def get_rank(self) -> int:
        return self._group.topology.rank

    def get_world_size(self) -> int:
        return self._group.topology.world_size

    def get_model(self) -> Any:
        """The given model; nnx models and SequentialModel hold the trained values, also in callbacks."""
        return self._model

    @property
    def state(self) -> TrainState:
        """The training state on the devices. Raises: GroupError before the first fit or load."""
        return self.run_state.state

    @property
    def run_state(self) -> RunState:
        """The position and state of training. Raises: GroupError before the first fit or load."""
        self._run.begun()
        return self._run.state

    @property
    def history(self) -> DistributedTrainingHistory:
        """The history of the last fit, or of the checkpoint that was loaded."""
        return self._run.history

    @property
    def stopped_by_signal(self) -> bool:
        """Whether a signal or Ctrl-C ended the last fit."""
        return reason_of(self.history.stopped_by) in (SIGNAL, INTERRUPT)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the outputs, if they were set; checkpoints store them."""
        return self._run.class_names

    @class_names.setter
    def class_names(self, names: tuple[str, ...]) -> None:
        self._run.class_names = tuple(map(str, names))

    @property
    def program(self) -> Program:
        """The compiled functions. Raises: GroupError before the first fit or load."""
        return self._run.begun()[1]

    @property
    def plan(self) -> Plan:
        """The plan of the last fit, load or evaluation. Raises: GroupError before the first."""
        return self._run.begun()[0]

    @property
    def params(self) -> PyTree:
        """The trained parameters as host arrays."""
        return self.values[0]

    @property
    def values(self) -> tuple[PyTree, PyTree]:
        """(parameters, model state) as evaluation sees them, host arrays."""
        return between_fits.values(self._run)

    def _hand_out_values(self) -> None:
        """Copies trained values into a model that holds values (SequentialModel, nnx), to be saved by it."""
        self._model_sync.push(lambda: self.values)
