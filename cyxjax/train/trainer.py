"""`DistributedTrainer`: the documented shell around the loop. It moves values; the core computes."""

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.adapter import adapt
from cyxjax.core.losses import PerExample, as_per_example
from cyxjax.core.mesh import local_replicas, local_value, num_replicas, put_replicated
from cyxjax.core.metrics import Metrics
from cyxjax.core.step import TrainState, init_state, place_state
from cyxjax.data.ledger import StreamFacts
from cyxjax.distributed import process_group
from cyxjax.distributed.ddp_values import hand_back, needs_inputs
from cyxjax.errors import CheckpointError, ConfigError, GroupError
from cyxjax.launch.heartbeat import beat
from cyxjax.observe.console import Console, build_console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink
from cyxjax.observe.sinks import NullSink
from cyxjax.train import fit_data as fit_inputs
from cyxjax.train import loop, out_of_memory, resume, rollback
from cyxjax.train.build import (
    Built,
    Recipe,
    build,
    check_precision,
    effective_batch_size,
    placer_for,
    program_shape,
)
from cyxjax.train.feed import build_feed, eval_batches, predict_all
from cyxjax.train.hooks import callbacks as called
from cyxjax.train.hooks import loss_spike
from cyxjax.train.hooks.ledger import LedgerHook
from cyxjax.train.loop import Feed, Hook, Position, RunState
from cyxjax.train.run import Run, build_hooks
from cyxjax.train.signals import StopSignals

PyTree = Any
_UNTRAINED = "this trainer has no parameters yet. HINT: call fit(...) or load_checkpoint(...) first."


class DistributedTrainer:
    """Trains a Flax model on every device of every process, as if on one device with the whole batch.

    model: linen or nnx module, (init, apply) pair, or SequentialModel. loss_fn: a loss of cyxjax, a function
    (output, target) -> value an example (or a mean), or None if the model returns {"loss": ...}.
    optimizer: any optax transformation. Without a group, one is made from the environment.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        metrics: Metrics | None = None,
        callbacks: Iterable[Hook] = (),
    ):
        if optimizer is None:
            raise ConfigError("no optimizer was given. HINT: pass cx.AdamOptimizer(0.001) as third argument.")
        self._model = model
        self._callbacks = called.check(callbacks)
        self._recipe = Recipe(
            adapt(model), as_per_example(loss_fn), optimizer, metrics or Metrics(), tuple(self._callbacks)
        )
        self._group = process_group.ensure()
        self._mesh = self._group.mesh
        self._replicas = num_replicas(self._mesh)
        self._remat = "none"
        self._config = DistributedTrainingConfig()
        self._built: Built | None = None
        self._shape: tuple = ()  # what `_built` was compiled for
        self._inputs: PyTree = None
        self._moment: RunState | None = None
        self._loaded = False  # the next fit goes on from a loaded moment
        self._ledger = LedgerHook()
        self.history = DistributedTrainingHistory()
        self.stopped_by_signal = False

    def fit(
        self,
        *data: Any,
        config: DistributedTrainingConfig | None = None,
        schedule: Any = None,
        console: Console | None = None,
        open_sink: Callable[[int], Sink] = lambda step: NullSink(),
    ) -> DistributedTrainingHistory:
        """Trains and returns the history: fit(X, y, config), fit(X, y, X_val, y_val, config),
        fit(dataset, val_dataset, config) or fit(loader, val_loader, config).

        A second call goes on from the trained parameters. With `config.resume` a run that was cut short goes
        on from its newest good checkpoint. Raises: ConfigError and DataError before anything is written.
        """
        feed, config = self.check(*data, config=config, schedule=schedule)
        console = console or build_console(self.is_master(), config.verbose)
        start = self._start(config, console)
        self._loaded = False
        with closing(open_sink(start.position.step)) as sink:  # also when training ends in an error
            return self._run(feed, start, config, sink, console)

    def check(
        self, *data: Any, config: DistributedTrainingConfig | None = None, schedule: Any = None
    ) -> tuple[Feed, DistributedTrainingConfig]:
        """What `fit` does before it writes or trains anything: the data and configuration fit together."""
        local = len(local_replicas(self._mesh))
        found, config = fit_inputs.parse(data, config, local, self._replicas)
        feed = build_feed(found, config, self._mesh, self._ledger.open())
        self._prepare(config, fit_inputs.first_inputs(found.train), feed.steps_per_epoch, schedule)
        built, state = self._ready(None)
        check_precision(built, state, self._inputs, config.precision, self._replicas)
        seen = jax.eval_shape(built.program.consensus, state)
        run = lambda inputs: jax.eval_shape(built.predict_step, seen, inputs)  # noqa: E731
        fit_inputs.check(found, run, self._recipe.loss, self._replicas, built.batch_size)
        return feed, config

    def evaluate(self, X: Any, y: Any = None, *, batch_size: int | None = None) -> tuple[float, float]:
        """(loss, accuracy) over all samples, each counted once: the same numbers at every world size.

        Accuracy is NaN where it means nothing (regression).
        """
        means = self.evaluate_metrics(X, y, batch_size=batch_size)
        return means["loss"], means["accuracy"]

    def evaluate_metrics(
        self, X: Any, y: Any = None, *, batch_size: int | None = None, max_batches: int | None = None
    ) -> dict[str, float]:
        """All metrics by name, over `max_batches` or all; data as in `evaluate`, or a loader."""
        dataset = fit_inputs.for_evaluation(X if y is None else (X, y))
        built, state = self._ready(fit_inputs.first_inputs(dataset))
        placer = placer_for(self._config, self._mesh)
        batches = eval_batches(placer, dataset, batch_size or built.batch_size, max_batches)
        return loop.evaluate(built.program, state, batches)

    def predict(self, X: PyTree, *, batch_size: int | None = None) -> PyTree:
        """The model's outputs for X in evaluation mode, on every rank: numpy, first dimension as X's."""
        built, state = self._ready(jax.tree.map(lambda a: np.asarray(a)[:1], X))
        seen = built.program.consensus(state)
        return predict_all(built.predict_step, seen, self._mesh, X, batch_size or built.batch_size)

    def save_checkpoint(self, path: str) -> None:
        """Everything that makes the next step, as a checkpoint folder named `path`; rank 0 writes it.

        Ranks need not call it together unless the strategy keeps a part of the state on each (zero1,
        local_sgd, ...). Raises: CheckpointError if it cannot be written.
        """
        self._save_at(path, self.moment)

    def load_checkpoint(self, path: str, step: int | None = None) -> None:
        """Goes back to what `save_checkpoint` (or a run) saved in `path`: its newest good step, or `step`.

        Raises: CheckpointError if there is none, or it is of another model.
        """
        self._barrier("load_checkpoint")  # a peer may still be writing what is read here
        if not Path(path).is_dir():
            raise CheckpointError(
                f"there is no checkpoint at {path!r}. HINT: name the folder save_checkpoint or a run made."
            )
        checkpointer = Checkpointer(path, is_writer=False)
        if self._built is None:
            meta = resume.latest_meta(checkpointer)
            config = DistributedTrainingConfig(**_own_fields(meta.get("config", {})))
            self._prepare(config, resume.stored_inputs(meta), None, None)
        if not self._restore(checkpointer, step):
            raise CheckpointError(
                f"{path!r} holds no checkpoint. HINT: check the path; a run keeps its own in checkpoints/."
            )
        self._loaded = True
        self._hand_out_values()

    def enable_gradient_checkpointing(self, policy: str = "full") -> None:
        """Recomputes activations in the backward pass from the next fit on: less memory, more time."""
        self._remat = policy

    def is_master(self) -> bool:
        return self._group.topology.is_master

    def get_rank(self) -> int:
        return self._group.topology.rank

    def get_world_size(self) -> int:
        return self._group.topology.world_size

    def get_model(self) -> Any:
        """The model as it was given; nnx models and SequentialModel hold the trained values."""
        return self._model

    @property
    def state(self) -> TrainState:
        """The training state on the devices. Raises: GroupError before the first fit or load."""
        return self.moment.state

    @property
    def moment(self) -> RunState:
        """Where training stands. Raises: GroupError before the first fit or load."""
        if self._moment is None:
            raise GroupError(_UNTRAINED)
        return self._moment

    @property
    def stream_facts(self) -> StreamFacts | None:
        """The order of samples of the last fit or check; None where samples have no numbers."""
        return self._ledger.tape.facts

    @property
    def loss(self) -> PerExample:
        """The loss as training uses it: one value an example."""
        return self._recipe.loss

    def place(self, state: TrainState) -> TrainState:
        """`state`'s host arrays on the devices, as training keeps them."""
        return place_state(state, self._ready(None)[0].sync, self._mesh)

    @property
    def program(self) -> loop.Program:
        """The compiled functions. Raises: GroupError before the first fit or load."""
        return self._ready(None)[0].program

    @property
    def params(self) -> PyTree:
        """The trained parameters as host arrays."""
        return self._trained()[0]

    # ---- the parts of a fit, in the order they happen ---------------------------------------------

    def _prepare(
        self, config: DistributedTrainingConfig, inputs: PyTree, steps_per_epoch: int | None, schedule: Any
    ) -> None:
        """Compiled functions for `config`, and a state: parameters go on, the optimizer starts anew."""
        built = self._built_for(config, steps_per_epoch, schedule)
        previous = self._built or built
        self._config, self._built, self._inputs = config, built, inputs
        if self._moment is None:
            params, model_state = jax.tree.map(
                np.asarray, built.fns.init(jax.random.key(config.seed), inputs)
            )
            state = init_state(built.sync, self._mesh, params, model_state, config.seed)
            self._moment = RunState(Position(), state, self._zeros())
        elif not self._loaded:
            self._moment = self._next_run(built, previous.agreed(self._moment.state), config.seed)
        if not self._loaded:
            self.history = self._new_history(config)

    def _built_for(
        self, config: DistributedTrainingConfig, steps_per_epoch: int | None, schedule: Any
    ) -> Built:
        """Compiled functions; those of the last fit if nothing that shapes them has changed."""
        shape = program_shape(config, self._mesh, steps_per_epoch, schedule, self._remat)
        if self._built is None or self._shape != shape:
            self._shape = shape
            return build(
                self._recipe,
                config,
                self._mesh,
                steps_per_epoch=steps_per_epoch,
                schedule=schedule,
                remat=self._remat,
            )
        return self._built

    def _next_run(self, built: Built, last: TrainState, seed: int) -> RunState:
        """A new run from the parameters of `last`; steps count on, so that keys and folders stay apart."""
        params, model_state = jax.tree.map(local_value, (last.params, last.model_state))
        state = init_state(built.sync, self._mesh, params, model_state, seed)
        steps = local_value(last.step)
        step = put_replicated(self._mesh, steps)
        return RunState(Position(int(steps)), state._replace(step=step), self._zeros())

    def _new_history(self, config: DistributedTrainingConfig) -> DistributedTrainingHistory:
        return DistributedTrainingHistory(
            effective_batch_size=effective_batch_size(config, self._mesh),
            world_size=self.get_world_size(),
            num_replicas=self._replicas,
        )

    def _start(self, config: DistributedTrainingConfig, console: Console) -> RunState:
        """Where the run starts: at its newest checkpoint, or at step 0."""
        folder = config.checkpoint_path
        if self._loaded:
            return self.moment
        wanted = config.resume != "never" and folder.is_dir()
        beat(-1, "checkpoint")
        if wanted and self._restore(resume.checkpointer_for(config, self.is_master())):
            place = self.moment.position
            console.note(
                f"Resuming from step {place.step} (epoch {place.epoch}, batch {place.step_in_epoch})"
                f" in {folder}"
            )
        elif config.resume == "must":
            raise CheckpointError(
                f"resume='must', but {folder} holds no checkpoint. "
                "HINT: check the run folder, or use resume='auto'."
            )
        beat(-1, "idle")
        return self.moment

    def _run(
        self, feed: Feed, start: RunState, config: DistributedTrainingConfig, sink: Sink, console: Console
    ) -> DistributedTrainingHistory:
        built = self._ready(None)[0]
        if start.position.epoch >= config.epochs:
            console.note(f"All {config.epochs} epochs are done. HINT: raise `epochs` to train on.")
            return self.history
        self._say_plan(built, config, console)
        with StopSignals() as signals, resume.checkpointer_for(config, self.is_master()) as checkpointer:
            checkpointer.rewind(start.position.step)  # what a crashed or earlier run did after it
            run = Run(
                self._recipe,
                built,
                config,
                self._mesh,
                self.history,
                self._ledger,
                self.is_master(),
                self._describe,
                self._save_at,
                signals,
                loss_spike.hooks_for(config),
                checkpointer,
                sink,
                console,
            )
            self._moment = self._train(feed, start, run)
        self._hand_out_values()
        self.history.skipped_steps = int(local_value(built.sync.skipped(self._moment.state.sync)))
        self.stopped_by_signal = self.history.stopped_by == "signal"
        return self.history

    def _train(self, feed: Feed, start: RunState, run: Run) -> RunState:
        """From `start` to the end, back to a checkpoint in between if the configuration says so."""
        config = run.config

        def once(moment: RunState) -> RunState:
            with out_of_memory.explained(config, run.built.batch_size, self._replicas):
                return loop.fit(
                    run.built.program,
                    feed,
                    moment,
                    build_hooks(run),
                    epochs=config.epochs,
                    in_flight=config.steps_in_flight,
                    eval_every=config.evaluate_every_n_epochs,
                    max_steps=config.max_steps,
                )

        go_back = lambda good_step: self._saved(run, good_step)  # noqa: E731
        return rollback.fit(once, start, go_back, run.console.note, config, run.history)

    def _say_plan(self, built: Built, config: DistributedTrainingConfig, console: Console) -> None:
        console.batch_plan(
            batch_size=built.batch_size,
            num_replicas=self._replicas,
            accumulation=config.gradient_accumulation_steps,
            world_size=self.get_world_size(),
            backend=self._group.backend,
        )

    # ---- state, on disk and off -------------------------------------------------------------------

    def _save_at(self, path: str, moment: RunState) -> None:
        built = self._ready(None)[0]
        resume.save_at(path, self.is_master(), moment, built.sync, self._describe(moment))

    def _describe(self, moment: RunState) -> dict[str, Any]:
        meta = resume.to_meta(moment, self.history, self._config.resolved(), self._inputs)
        return meta | self._ledger.meta(moment)

    def _saved(self, run: Run, good_step: int) -> RunState | None:
        """The newest good checkpoint of `good_step` or before, later ones set aside; None without one.

        History and ledger stay. Waits for the save that may be under way.
        """
        run.checkpointer.wait()
        self._barrier("rollback")
        if not any(step <= good_step for step in list_steps(run.config.checkpoint_path)):
            return None
        run.checkpointer.rewind(good_step)
        self._barrier("rewound")
        found = resume.load(run.checkpointer, self.moment.state, run.built.sync, self._mesh)
        return None if found is None else found[0]

    def _restore(self, checkpointer: Checkpointer, step: int | None = None) -> bool:
        """Takes the newest good step of a folder as the present moment; whether there was one."""
        built, state = self._ready(None)
        found = resume.load(checkpointer, state, built.sync, self._mesh, step)
        if found is None:
            return False
        self._moment, history, meta = found
        self._ledger.restore(meta)
        history.world_size, history.num_replicas = self.get_world_size(), self._replicas
        history.stopped_by = ""
        self.history = history
        return True

    def _ready(self, inputs: PyTree | None) -> tuple[Built, TrainState]:
        """The compiled functions and the state; made from `inputs` if nothing was trained or loaded."""
        if self._built is None:
            if inputs is None:
                raise GroupError(_UNTRAINED)
            self._prepare(self._config, inputs, None, None)
        assert self._built is not None
        return self._built, self.moment.state

    def _trained(self) -> tuple[PyTree, PyTree]:
        """(params, model_state) that all replicas agree on, as host arrays."""
        built, state = self._ready(None)
        seen = built.program.consensus(state)
        return jax.tree.map(local_value, (seen.params, seen.model_state))

    def _hand_out_values(self) -> None:
        """A model that holds values (SequentialModel, nnx) takes over the trained ones, to be saved by it."""
        if not needs_inputs(self._model):
            hand_back(self._model, *self._trained())

    def _zeros(self) -> np.ndarray:
        return np.zeros((len(self._recipe.metrics.names), 2))

    def _barrier(self, name: str) -> None:
        if self.get_world_size() > 1:
            multihost_utils.sync_global_devices(name)


def _own_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The training part of a stored configuration (an experiment's has more)."""
    known = DistributedTrainingConfig.model_fields
    return {name: value for name, value in config.items() if name in known}
