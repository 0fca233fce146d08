"""What a trainer holds between its calls: compiled functions, the state they train, history and ledger."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.mesh import local_value, num_replicas
from cyxjax.core.model.lora import merged
from cyxjax.core.portable import holds_values
from cyxjax.core.rows import whole_batch
from cyxjax.core.step import TrainState
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError, ConfigError, GroupError
from cyxjax.launch.backend import pages, programs
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.console import Console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train import resume
from cyxjax.train.checks import order as checks
from cyxjax.train.feeding import fit_data
from cyxjax.train.feeding.places import Marks
from cyxjax.train.feeding.taken import Taker
from cyxjax.train.hooks.ledger import LedgerHook
from cyxjax.train.loop import RunState
from cyxjax.train.program import Program, Recipe
from cyxjax.train.settings import Settings, resolve
from cyxjax.train.start import config_diff, exact
from cyxjax.train.start.dispatch import has_whole_batch
from cyxjax.train.start.prepare import Prepared, first_run, for_fit, for_inputs, next_run
from cyxjax.train.state import other_state
from cyxjax.train.state.present import UNTRAINED, Present

PyTree = Any


class Session:
    """The course of one recipe on one mesh, over any number of fits and loads."""

    def __init__(self, recipe: Recipe, group: ProcessGroup):
        self.recipe, self.group = recipe, group
        self.remat = "none"
        self.hand_out: Callable[[], None] | None = None  # the present values to a model that holds them
        self.ledger = LedgerHook()
        self.marks = Marks()  # where this rank stands in its stream
        self.history = DistributedTrainingHistory()
        self._prepared: Prepared | None = None
        self.present = Present()
        self._loaded = False  # the next fit goes on from a loaded state
        self.class_names: tuple[str, ...] = ()  # in the order of the model's outputs
        self.restored: dict[str, Any] = {}  # what the checkpoint that the run goes on from says of itself

    @property
    def is_master(self) -> bool:
        return self.group.topology.is_master

    @property
    def mesh(self) -> Mesh:
        return self.group.mesh

    @property
    def prepared(self) -> Prepared:
        """Raises: GroupError before the first fit or load."""
        if self._prepared is None:
            raise GroupError(UNTRAINED)
        return self._prepared

    @property
    def program(self) -> Program:
        return self.prepared.program

    @property
    def run_state(self) -> RunState:
        """Where training stands. Raises: GroupError before the first fit or load."""
        return self.present.get()

    @run_state.setter
    def run_state(self, value: RunState) -> None:
        self.present.at(value)

    def agreed(self) -> TrainState:
        """The state all replicas agree on, as evaluation sees it."""
        return self.program.consensus(self.run_state.state)

    def output_shapes(self, inputs: PyTree) -> PyTree:
        """Of the model, for shapes of inputs: nothing is computed."""
        seen = jax.eval_shape(self.program.consensus, self.run_state.state)
        with whole_batch(has_whole_batch(self.prepared.settings.step, self.mesh)):
            return jax.eval_shape(self.program.predict_step, seen, inputs)

    def taker(self) -> Taker:
        """Model, loss and metrics as they are."""
        is_whole = has_whole_batch(self.prepared.settings.step, self.mesh)
        here = self.output_shapes, self.recipe.loss, self.recipe.metrics, num_replicas(self.mesh)
        return Taker(*here, self.prepared.settings.step.batch.batch_size, is_whole, self.prepared.inputs)

    def values(self) -> tuple[PyTree, PyTree]:
        """(params, model_state) that all replicas agree on, host arrays; adapters added to their kernels."""
        seen = self.program.evaluated(self.run_state.state)
        params, model_state = jax.tree.map(local_value, (seen.params, seen.model_state))
        return merged(params, self.prepared.settings.step.lora), model_state

    def warn_if_untrained(self, call: str) -> None:
        """Prints a line where parameters are still those that were drawn, by a model that holds none."""
        untrained = self.run_state.position.step == 0 and not self._loaded
        if untrained and self.is_master and not holds_values(self.recipe.fns, self.prepared.inputs):
            warn_on_stderr(
                f"{call}: the parameters are random, nothing was trained or loaded. HINT: call fit or "
                "load_checkpoint first."
            )

    # ---- from one start to the next ---------------------------------------------------------------

    def prepare(
        self, data: tuple[Any, ...], config: DistributedTrainingConfig | None, schedule: Any
    ) -> Prepared:
        """All of a fit that comes before its first write. Raises: ConfigError, DataError."""
        self.present.refuse_in_fit("fit")
        if config is not None:
            programs.keep(config.compile_cache, tell=self.is_master)
            pages.use(config.memory_pages, self.group.topology.local_world_size)
        tape = self.ledger.open()
        tape.marks = self.marks
        kept: Any = {"remat": self.remat, "last": self._prepared, "check": checks.before_building}
        prepared = for_fit(self.recipe, self.mesh, data, config, tape, schedule=schedule, **kept)
        assert prepared.data is not None
        self.marks.begin(fit_data.is_shared(prepared.data.train), self._loaded)
        self._begin(prepared)
        here = self.run_state.state, self.recipe, self.group, self.taker()
        content, fingerprint = checks.before_training(self.prepared, *here, loaded=self._loaded)
        known: Any = {"content": content, "fingerprint": fingerprint, "own_code": config_diff.own_code()}
        self._prepared = self.prepared._replace(**known)
        return self._prepared

    def ensure(self, inputs: PyTree, config: DistributedTrainingConfig | None = None) -> None:
        """Functions and a state made from one sample's `inputs`, if nothing was trained or loaded."""
        if self._prepared is None:
            config = config or DistributedTrainingConfig()
            settings = resolve(config, num_replicas(self.mesh), remat=self.remat)
            self._begin(for_inputs(self.recipe, self.mesh, settings, inputs))

    def _begin(self, prepared: Prepared) -> None:
        """A state for `prepared`: parameters go on, the optimizer starts anew; a loaded state stays."""
        previous = self._prepared or prepared
        metrics = self.recipe.metrics.num_training_rows
        if prepared.settings.step.lora != previous.settings.step.lora:
            raise ConfigError(
                "lora changed since the last fit. HINT: begin with a new trainer, and init_from what this "
                "one has saved.",
                key="lora",
            )
        if not self.present.known:
            saving, first = prepared.settings.saving, prepared.settings.first_values
            goes_on = saving.resume != "never" and bool(list_steps(saving.folder))
            begins = None if goes_on else first
            self.run_state, lines = first_run(prepared, self.mesh, metrics, first=begins)
            prepared = prepared._replace(lines=tuple(lines))
        elif not self._loaded:
            agreed = previous.program.agreed(self.run_state.state)
            self.run_state = next_run(prepared, self.mesh, agreed, metrics)
        else:
            config_diff.refuse_other_strategy(previous.settings.step.comm, prepared.settings.step.comm)
            state = prepared.program.sync.stow(previous.program.sync.fetch(self.run_state.state))
            self.run_state = self.run_state._replace(state=state)
        self._prepared = prepared
        if not self._loaded:
            self.restored = {}
            self.history = DistributedTrainingHistory(
                effective_batch_size=self._effective_batch(prepared),
                world_size=self.group.topology.world_size,
                num_replicas=num_replicas(self.mesh),
            )

    def _effective_batch(self, prepared: Prepared) -> int:
        """Samples of a step; of a loader that does not tell, of the first one, were all ranks like this."""
        untold = None if prepared.data is None else fit_data.untold_rows(prepared.data)
        here = prepared.settings.step.batch.global_batch_size
        return here if untold is None else untold * self.group.topology.world_size

    def start(self, settings: Settings, console: Console) -> tuple[RunState, bool]:
        """(where a run starts, whether it goes on): from what was loaded, its newest checkpoint, or step 0.

        Raises: CheckpointError where `settings` want a checkpoint and there is none.
        """
        resumed, self._loaded = self._loaded or self._resume(settings, console), False
        prepared, content = self.prepared, self.prepared.content
        if resumed:
            config_diff.refuse_other_epochs(self.restored.get("config", {}), settings.told)
        if self.is_master:
            other_mode = exact.changed_mode(self.restored, settings.exactness.mode) if resumed else []
            told = config_diff.told(settings.told, self.recipe, prepared.augment)
            other = config_diff.changed_keys(self.restored.get("config", {}), told)
            data = config_diff.changes(self.restored, content)
            for line in other_mode + other + data:
                warn_on_stderr(line)  # not to the console: it may be switched off
        stored, here = self.restored.get("exact", {}), prepared.fingerprint
        samples = config_diff.other_samples(self.restored, content) if stored and here else []
        different = exact.differences(stored, here) + samples
        exact.judge(different, settings.exactness.on_other_bits, warn_on_stderr)
        for line in () if resumed else prepared.lines:
            console.note(line)
        if self.group.topology.world_size > 1 and not content:
            console.note("A loader's samples have no numbers: the data of the ranks were not compared.")
        return self.run_state, resumed

    def _resume(self, settings: Settings, console: Console) -> bool:
        """Takes the newest checkpoint of the run's folder, where `settings` want it; whether there is one."""
        saving, checkpointer = settings.saving, None
        folder = saving.folder
        report_progress(-1, "checkpoint")
        if saving.resume != "never":
            checkpointer = resume.restorer_for(folder, self.group, saves=saving.saves)
        resumed = bool(checkpointer and self.restore(checkpointer, in_place=True))
        if checkpointer and resumed:
            place = self.run_state.position
            exact.judge_step(checkpointer.directory, place.step, settings, self.group, warn_on_stderr)
            console.note(
                f"Resuming from step {place.step} (epoch {place.epoch}, sample {place.samples}) in {folder}"
            )
        elif saving.resume == "must":
            raise resume.nothing_to_resume(folder)
        report_progress(-1, "idle")
        return resumed

    # ---- on disk and off --------------------------------------------------------------------------

    def load(self, checkpointer: Checkpointer, step: int | None) -> bool:
        """Takes a folder's newest good step, or `step`, for the next fit; False without one."""
        self.present.refuse_in_fit("load_checkpoint")
        if self._prepared is None:
            meta = resume.latest_meta(checkpointer)
            config, odd = resume.fitting(resume.stored_config(meta), num_replicas(self.mesh))
            if odd and self.is_master:
                warn_on_stderr(odd)
            self.ensure(resume.stored_inputs(meta), config)
        found = self.restore(checkpointer, step)
        for line in config_diff.changed_files(self.restored) if found and self.is_master else []:
            warn_on_stderr(line)
        self._loaded = self._loaded or found
        return found

    def restore(self, checkpointer: Checkpointer, step: int | None = None, *, in_place: bool = False) -> bool:
        """Takes the newest good step of a folder as the present state; whether there was one."""
        here, sync = self.run_state.state, self.program.sync
        now = config_diff.told(self.prepared.settings.told, self.recipe, self.prepared.augment)
        with other_state.in_words(checkpointer, step, now, resume.shapes_of(self.prepared.inputs)):
            found = resume.load(checkpointer, here, sync, self.mesh, step, in_place=in_place)
        if found is None:
            return False
        moment, history, meta = found
        metrics = self.recipe.metrics
        sums = config_diff.sums_of(meta, moment.sums, metrics.names, metrics.num_training_rows)
        self.run_state = moment._replace(sums=sums)
        topology = self.group.topology
        self.marks.restore(meta, topology.rank, topology.world_size)
        names = tuple(meta.get("classes", ()))
        if names and self.class_names and names != self.class_names:
            raise CheckpointError(
                f"the checkpoint has the classes {', '.join(names)}; this run {', '.join(self.class_names)}. "
                "HINT: train on the classes of the checkpoint, or begin anew (resume: never)."
            )
        self.class_names = self.class_names or names
        self.restored = meta
        self.ledger.restore(meta, moment.position)
        history.world_size, history.num_replicas = self.group.topology.world_size, num_replicas(self.mesh)
        history.effective_batch_size = self._effective_batch(self.prepared)
        history.stopped_by = ""
        self.history = history
        return True

    def save_at(self, path: str, run_state: RunState) -> None:
        """`run_state` as the only step of the folder `path`. Raises: CheckpointError if it cannot."""
        resume.save_at(path, self.group, run_state, self.program.sync, self.describe(run_state))

    def describe(self, run_state: RunState) -> dict[str, Any]:
        """What a checkpoint of `run_state` says beside its arrays."""
        told = config_diff.told(self.prepared.settings.told, self.recipe, self.prepared.augment)
        said = resume.to_meta(run_state, self.history, told, self.prepared.inputs)
        prepared = self.prepared
        said |= config_diff.to_meta(prepared.content, prepared.own_code) | {
            "metrics": list(self.recipe.metrics.names)
        }
        said |= self.marks.meta(run_state.position)
        said |= {"classes": list(self.class_names)} if self.class_names else {}
        return (
            said
            | self.ledger.meta(run_state)
            | ({"exact": prepared.fingerprint} if prepared.fingerprint else {})
        )
