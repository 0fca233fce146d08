"""The run of a trainer: its plan, program and current state, and what else its checkpoints hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cyxjax.checkpoint import tree
from cyxjax.checkpoint.manifest import Manifest
from cyxjax.config.sections import InitFromConfig
from cyxjax.core.mesh import REPLICATED, local_value, num_replicas, put_replicated
from cyxjax.core.model.lora import is_adapter
from cyxjax.core.portable import build_draw, holds_values, moved, to_portable
from cyxjax.core.precision import cast_floats, parse_policy
from cyxjax.core.step import TrainState, state_spec
from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.errors import CheckpointError, ConfigError, GroupError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.comparison import naming_settings
from cyxjax.train.feeding import fit_data
from cyxjax.train.feeding.stream_positions import StreamPositions
from cyxjax.train.hooks.hook import Feed, Hook, Position, RunState
from cyxjax.train.hooks.ledger import LedgerHook
from cyxjax.train.plan import Plan, input_shapes
from cyxjax.train.program import Program, build_program
from cyxjax.train.settings import Settings


class Run:
    """Plan, program, state, history, ledger and places in streams over any number of fits and loads of one
    trainer.

    A step consumes the state before it, so only the current state is kept: a fit provides it through
    `follow`.
    """

    def __init__(self) -> None:
        self.last: tuple[Plan, Program] | None = None  # of the last fit, load or evaluation
        self.history = DistributedTrainingHistory()
        self.ledger = LedgerHook()
        self.stream_positions = StreamPositions()  # the places of all ranks in their streams
        self.class_names: tuple[str, ...] = ()  # in the order of the model's outputs
        self.restored: dict[str, Any] = {}  # metadata of the checkpoint that the run continues from
        self.loaded_from: Path | None = None  # the folder of the state that the next fit continues from
        self.folder: Path | None = None  # where the last fit saved
        self.first_step = 0  # at which the optimizer's state was new, and its schedule began
        self.hooks: list[Hook] = []  # of the last fit; after a load their states are in `restored`
        self.notes: list[str] = []  # about the values that the parameters begin with
        self._now: Callable[[], RunState] | None = None
        self.is_drawn = True  # whether the state is the first one, if any: neither trained nor loaded
        self._is_fitting = False

    @property
    def state(self) -> RunState:
        assert self._now is not None
        return self._now()

    @state.setter
    def state(self, moment: RunState) -> None:
        self.follow(lambda: moment)

    def follow(self, now: Callable[[], RunState]) -> None:
        """From now on, `now` returns the current state."""
        self._now = now

    @contextmanager
    def fitting(self, feed: Feed) -> Iterator[None]:
        """A block in which a fit changes the state; another fit or a load is refused. Closes `feed`."""
        self.refuse_in_fit("fit")
        self._is_fitting = True
        try:
            yield
        finally:
            self._is_fitting = False
            feed.close()

    def refuse_in_fit(self, call: str) -> None:
        """Raises: GroupError during a fit, whose loop would ignore the state that `call` makes."""
        if self._is_fitting:
            raise GroupError(
                f"{call}(...) was called during a fit of this trainer (in a callback, or in another "
                "thread). HINT: call it after the fit, or use another trainer; evaluate, predict and "
                "save_checkpoint may be called."
            )

    @property
    def is_loaded(self) -> bool:
        """Whether the next fit continues from a loaded state."""
        return self.loaded_from is not None

    def begin_fit(self) -> None:
        """From now on the state is that of a fit. Called when training begins: until then a fit may be
        refused, and the next one continues from the same drawn or loaded state.
        """
        self.loaded_from, self.is_drawn = None, False

    def begun(self) -> tuple[Plan, Program]:
        """Plan and program of the last fit, load or evaluation. Raises: GroupError before the first."""
        if self.last is None:
            raise GroupError(
                "this trainer has no parameters yet. HINT: call fit(...) or load_checkpoint(...) first."
            )
        return self.last

    def begin(self, plan: Plan) -> tuple[Program, TrainState]:
        """The program for `plan`, which is the last one if it was compiled for the same step, and the state
        that `plan` begins with: a first state; the parameters of the previous fit with a new optimizer state;
        or the loaded state.

        Raises: ConfigError if `plan` cannot continue from the previous one.
        """
        if self.last is not None and _same_step(self.last[0], plan):
            program = self.last[1]
        else:
            program = build_program(plan.recipe, plan.settings.step, plan.group.mesh, inputs=plan.inputs)
        before, made = self.last or (plan, program)
        if not self.is_drawn:
            _refuse_unequal(before.settings, plan.settings, loaded=self.is_loaded)
        self.notes = []
        if self.is_drawn:  # also after `evaluate` or `predict`, which do not choose the parameters
            first = None if plan.own else plan.settings.init_from
            self.state, self.notes = first_state(plan, program, first, drawn=plan.own is None)
            self.first_step = 0
        elif self.loaded_from is not None:
            held = made.sync.fetch(self.state.state)
            with naming_settings(plan, self.loaded_from, self.restored):
                held = _as_kept_by(program, plan, held, made)
            self.state = self.state._replace(state=program.sync.stow(held))
        else:
            self.state = next_state(plan, program, made.agreed(self.state.state))
            self.first_step = self.state.position.step
        if not self.is_loaded:
            self.restored = {}
            self.history = DistributedTrainingHistory()
        self.describe_group(plan)
        self.last = plan, program
        return program, self.state.state

    def refuse_replacing(self, plan: Plan, own: Manifest) -> None:
        """Raises: ConfigError if what was trained elsewhere would be replaced by the run in the folder, which
        neither ends (`own` is its newest checkpoint) nor began with as many steps.
        """
        folder, held = plan.settings.saving.folder, self.state.position.step
        ends = own.step, own.meta.get("first_step", 0)
        is_other = held > 0 and self.folder != folder and held not in ends
        if on_any_rank(plan.group, "whether a folder holds another run", is_other):
            raise ConfigError(
                f"this trainer has trained {held} steps, which are not those of the run in {folder}, and "
                "would be lost. HINT: name another run_dir or checkpoint_dir, set resume='never' to begin "
                "anew in it, or continue that run with a new trainer.",
                key="resume",
            )

    def warn_if_untrained(self, call: str) -> None:
        """Prints a warning if the parameters were neither trained nor loaded."""
        plan, _ = self.begun()
        untrained = self.state.position.step == 0 and not self.is_loaded
        if untrained and plan.group.topology.is_master and not holds_values(plan.recipe.fns, plan.inputs):
            warn_on_stderr(
                f"{call}: the parameters are random, the model was neither trained nor loaded. "
                "HINT: call fit or load_checkpoint first."
            )

    def describe_group(self, plan: Plan) -> None:
        """Writes the sizes of the group and its batch into the history."""
        history = self.history
        first_rows = fit_data.rows_of_first_step(plan.data)
        history.world_size = plan.group.topology.world_size
        history.num_replicas = num_replicas(plan.group.mesh)
        # For a loader without a batch size: that of the first step, assuming that all ranks are the same.
        known = plan.settings.step.batch.global_batch_size
        history.effective_batch_size = known if first_rows is None else first_rows * history.world_size


def _same_step(was: Plan, now: Plan) -> bool:
    """Whether `now` uses the program of `was`: its settings are equal, and so are the shapes of its samples,
    on which the parts of fsdp and zero1 depend."""
    return was.settings.step == now.settings.step and input_shapes(was.inputs) == input_shapes(now.inputs)


def first_state(
    plan: Plan, program: Program, first: InitFromConfig | None = None, *, drawn: bool = True
) -> tuple[RunState, list[str]]:
    """(step 0, notes about its parameters): drawn from the seed, or read from what `first` names.

    drawn: False if the values do not matter: zeros take less time, except where replicas draw their parts.
    """
    mesh, seed, inputs = plan.group.mesh, plan.settings.seed, plan.inputs
    notes: list[str] = []
    first = first if first and first.path else None
    holds = (program.sync.keeps_parts or not drawn) and holds_values(program.fns, inputs)
    if first is None and program.sync.keeps_parts and not holds:
        state = build_draw(program.fns, program.sync, mesh)(np.uint32(seed), inputs)
    else:
        init = program.fns.init if drawn or holds else partial(_zeros, program.fns.init)
        params, model_state = jax.tree.map(np.asarray, init(jax.random.key(seed), inputs))
        if first is not None:
            params, model_state, notes = _with_first_values(first, params, model_state)
        params, model_state = put_replicated(mesh, (params, model_state))
        state = program.init(params, model_state, seed)
    return RunState(Position(), state, _no_sums(program)), notes


def _zeros(init: Callable[..., PyTree], *args: Any) -> PyTree:
    """Zeros with the shapes and dtypes of `init(*args)`."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(init, *args))


def _with_first_values(
    first: InitFromConfig, params: PyTree, model_state: PyTree
) -> tuple[PyTree, PyTree, list[str]]:
    """(params, model_state, a table of the arrays read): drawn values are replaced by what `first` names.

    Adapters (LoRA) stay as drawn. Raises: ConfigError for a file that cannot be read or does not fit, or that
    holds adapters, which would be left out: the base alone is a different model.
    """
    from cyxjax.weights.match import fill  # here: these import readers of files
    from cyxjax.weights.read import read_weights

    assert first.path
    drawn = {"params": params, "model_state": model_state}
    leaves = dict(named_leaves(drawn))
    targets = {name: leaf for name, leaf in leaves.items() if not is_adapter(name)}
    try:
        weights = read_weights(Path(first.path))
        if adapters := [name for name in weights.arrays if is_adapter(name)]:
            raise CheckpointError(
                f"{first.path} holds adapters apart from their kernels ({adapters[0]}). HINT: begin with "
                "merged parameters: of `cyxjax export RUN m.safetensors`, or trainer.params saved to a file."
            )
        found = fill(weights, targets, dict(first.map), strict=first.strict)
    except CheckpointError as err:  # before anything is trained or written: a wrong configuration
        raise ConfigError(str(err), key="init_from.path") from err
    values = [found.values.get(name, np.asarray(leaf)) for name, leaf in leaves.items()]
    trees = jax.tree.unflatten(jax.tree.structure(drawn), values)
    return trees["params"], trees["model_state"], found.table


def _as_kept_by(program: Program, plan: Plan, state: TrainState, made: Program) -> TrainState:
    """The loaded `state`, which `made` keeps, as `program` keeps it.

    Raises: OtherStateError if it differs from a state of `program` in the arrays that a checkpoint holds.
    """
    mesh, like = plan.group.mesh, program.state_shapes(plan.inputs)
    held = to_portable(state, made.sync, mesh)
    tree.refuse(tree.differences(tree.named_leaves(held), to_portable(like, program.sync, mesh)))
    same = state_spec(made.sync) == state_spec(program.sync)
    return state if same else moved(state, made.sync, like, program.sync, mesh)


def _refuse_unequal(was: Settings, now: Settings, *, loaded: bool) -> None:
    """Raises: ConfigError for settings that a fit takes from the state it continues from, if they differ."""
    compared: dict[str, tuple[Any, Any]] = {"lora": (was.step.lora, now.step.lora)}
    if now.init_from.path and not loaded:
        compared["init_from"] = was.init_from, now.init_from
    for key, (before, after) in compared.items():
        if before != after:
            raise ConfigError(
                f"{key} is {after!r} in this fit, and was {before!r} in what this trainer trained or loaded. "
                "HINT: use a new trainer, with init_from or checkpoint_dir=<that folder>, resume='auto'.",
                key=key,
            )


def next_state(plan: Plan, program: Program, agreed: TrainState) -> RunState:
    """A new run from the parameters of `agreed`; steps continue, so that keys and folders differ."""
    mesh = plan.group.mesh
    params = cast_floats(agreed.params, parse_policy(plan.settings.step.precision).params)
    params, model_state = jax.tree.map(partial(_on_mesh, mesh), (params, agreed.model_state))
    state = program.init(params, model_state, plan.settings.seed)
    steps = local_value(agreed.step)
    state = state._replace(step=put_replicated(mesh, steps))
    return RunState(Position(int(steps)), state, _no_sums(program))


def _no_sums(program: Program) -> np.ndarray:
    return np.zeros((program.metrics.num_training_rows, 2))


def _on_mesh(mesh: Mesh, leaf: jax.Array) -> jax.Array:
    """`leaf` placed as `first_state` places its own, so that one program makes both states."""
    lies_so = leaf.sharding == NamedSharding(mesh, REPLICATED)
    return leaf if lies_so else put_replicated(mesh, local_value(leaf))
