"""`DistributedDataParallel`: torch's wrapper around the phases of a step, for hand-written loops.

    outputs = ddp(inputs)
    loss = ddp.loss(criterion, outputs, targets)
    loss.backward()                    # or ddp.backward(criterion.backward(outputs, targets))
    ddp.update_parameters(optimizer)

It holds the state and passes it to the programs of `core/facade.py`. With a loss of cyxjax the
results are those of the compiled trainer, bit for bit. The trainer is faster: its step is one program.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax

from cyxjax.core import facade, makers
from cyxjax.core import local_view as view
from cyxjax.core.mesh import REPLICATED, local_replicas, local_value
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.lora import with_frozen
from cyxjax.core.precision import autocast_dtype, cast_to
from cyxjax.core.step import TrainState
from cyxjax.core.trees import PyTree, is_traced
from cyxjax.distributed import collectives, comm_hooks
from cyxjax.distributed import ddp_values as values
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.ddp_state import DDPConfig, Gathered, HeldState, compiler_options
from cyxjax.distributed.model_sync import ModelSync
from cyxjax.distributed.payload import as_arrays
from cyxjax.distributed.process_group import ProcessGroup, current
from cyxjax.errors import GroupError
from cyxjax.launch.interrupts import interrupted_at_end


class DistributedDataParallel:
    """Wraps a model: every process passes its own rows, and gradients are averaged over processes.

    model: as for the trainer. Inputs are one argument, a tree of arrays (n, ...); n may differ between
    processes, and be 0. A process that owns several devices splits its rows among them.
    Parameters are drawn from `seed`: immediately if the model allows it, else in the first forward pass, in
    which all ranks must then take part. Rank 0's are broadcast.
    bucket_cap_mb: as `DDPConfig.bucket_size_mb`. device_ids, output_device: accepted; devices are chosen
    when the group is formed. broadcast_buffers, find_unused_parameters, gradient_as_bucket_view,
    static_graph: accepted; running statistics are averaged over all samples in any case.
    Raises: GroupError before init_process_group; DesyncError naming the leaf if models differ.
    """

    def __init__(
        self,
        model: Any,
        config: DDPConfig | None = None,
        *,
        device_ids: Any = None,
        output_device: Any = None,
        broadcast_buffers: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        seed: int = 42,
    ) -> None:
        self._group = current() if process_group is None else process_group
        self._mesh, self._local = self._group.mesh, self._group.mesh.local_mesh
        self._config = config or DDPConfig()
        self._model, self._fns, self._seed = model, adapt(model), seed
        self._model_sync = ModelSync(model)
        fns, local, num_replicas = self._fns, self._local, self._mesh.size
        self.is_frozen: Callable[[str], bool] | None = None
        """Whether the parameter of this name gets no gradient, as an optimizer with groups says."""
        # On one process's devices; a program for each dtype of `autocast`.
        self._forward = cache(
            lambda dtype, is_frozen, *how: facade.build_forward(
                with_frozen(cast_to(fns, dtype), is_frozen), local, num_replicas, *how
            )
        )
        self._infer = cache(lambda dtype: facade.build_infer(cast_to(fns, dtype), local))
        self._backward = cache(lambda has_rows: facade.build_backward(local, has_rows))
        bucket_mb = self._config.bucket_size_mb if bucket_cap_mb is None else bucket_cap_mb
        options = compiler_options(self._mesh.devices.flat[0].platform, bucket_mb)
        hook = comm_hooks.from_config(self._config.comm_hook)
        self._state = HeldState(self._mesh, hook, options, keeps=self._model_sync.holds_values)
        self._since = Gathered()  # the last update
        self._returned: Any = lambda: None  # weak: the first array that `parameters` returned last
        if self._model_sync.holds_values:  # it needs no inputs to know its shapes
            self.init(None)

    def forward(self, inputs: PyTree) -> PyTree:
        """The model's output for this process's rows, (n, ...), on this process's devices.
        In training mode `backward` may follow once. Nothing is kept for it in evaluation mode, nor within the
        loss function of another model (a GAN's generator), which differentiates through this one.
        """
        inputs = as_arrays(inputs)
        rows = jax.tree.leaves(inputs)[0].shape[0]
        if self._state.here is None:
            self.init(inputs)
        self._pull()
        here, since = self._state.here, self._since
        placed = view.place_rows(self._local, inputs)
        if not self.training:
            run = self._infer(autocast_dtype())
            return view.cut_rows(run(here.params, here.model_state, placed), rows)
        carried = since.carried or facade.Carried(here.model_state, None)
        first = np.int32(local_replicas(self._mesh).start)
        draw = facade.Draw(here.key, here.step, np.int32(since.num_rows), first)
        is_padded = view.padded_rows(rows, self._local) > rows
        run = self._forward(autocast_dtype(), self.is_frozen, since.carried is None, is_padded)
        weight = view.row_weight(rows, self._local)
        output, pullback, carried = run(here.params, carried, draw, placed, weight)
        output = view.cut_rows(output, rows)
        if not is_traced(inputs):
            since.output, since.pullback, since.carried = output, pullback, carried
            since.num_rows += len(weight) // self._local.size
            makers.note(output, self)
        return output

    __call__ = forward

    def loss(self, criterion: Any, output: PyTree, target: PyTree = None) -> values.BoundLoss:
        """The mean loss of this process's rows, with `.backward()`; scale it freely, `loss / 4`.

        criterion: a loss of cyxjax, a function (output, target), or None if the model returns {"loss": ...}.
        output: the model's, or arrays of it.
        Raises: ConfigError for a loss over the global batch of several processes, or of this model's values.
        """
        with values.in_loss_of(self):
            value, grad = facade.loss_and_output_grad(criterion, output, target)
        return values.BoundLoss(value, *values.of_whole(grad, output, self._since.output), self)

    @interrupted_at_end()
    def backward(self, output_grad: PyTree, scale: float = 1.0, at: PyTree = None) -> None:
        """Backpropagates `scale * output_grad` through the last forward pass and adds to the gradients.

        output_grad: gradient of this process's mean loss with respect to the output; at: that output, if
        known. Nothing is sent yet. Raises: GroupError without a forward pass, in evaluation mode, or after
        `sync_gradients`; DataError for a gradient of a different structure or output.
        """
        since = self._since
        if since.pullback is None or not self.training:
            raise GroupError(
                "backward needs a forward pass in training mode, and each forward pass allows one "
                "backward. HINT: call forward first; after eval(), call train()."
            )
        if since.mean_grads is not None:
            raise GroupError(
                "backward was called after the gradients were averaged; the mean would not include its own. "
                "HINT: call sync_gradients() after the last backward of a step; zero_grad() starts a new one."
            )
        values.check_like(output_grad, since.output, at)
        placed = view.place_rows(self._local, output_grad, pad_with_zeros=True)
        factor = np.float32(scale * self._mesh.size / self.get_world_size())
        has_rows = jax.tree.leaves(output_grad)[0].shape[0] > 0
        since.grads = self._backward(has_rows)(since.pullback, placed, factor, since.grads)
        since.pullback = since.output = None

    @interrupted_at_end()
    def sync_gradients(self) -> PyTree:
        """The mean over processes of the accumulated gradients: one reduction. All ranks call it together.

        The mean is kept, and `update_parameters` applies it without reducing again.
        """
        since = self._since
        if since.mean_grads is None:
            since.mean_grads = self._state.reduce(since.grads)
            since.grads = None
        return view.to_local(self._mesh, since.mean_grads, REPLICATED)

    @interrupted_at_end()
    def update_parameters(self, optimizer: optax.GradientTransformation) -> None:
        """Averages the gradients and updates the parameters by `optimizer`. All ranks call it together.

        optimizer: any optax transformation, the same object in every step. Gradients are zero afterwards.
        """
        self._pull()
        self.is_frozen = getattr(optimizer, "is_frozen", None)
        self._state.use_optimizer(optimizer)
        self._state.update(self._since)
        self._since = Gathered()
        self._push()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards gradients, and all forward passes except one whose `backward` may still be called."""
        since, self._since = self._since, Gathered()
        if since.pullback is not None:
            self._since = replace(since, grads=None, mean_grads=None, are_finite=None)

    def no_sync(self) -> AbstractContextManager[None]:
        """torch's context manager; it has no effect here, since `backward` never reduces gradients."""
        return nullcontext()

    def unscale_gradients(self, factor: float) -> bool:
        """The mean gradients times `factor`, once in a step; returns whether all ranks' are finite."""
        since = self._since
        if since.are_finite is None:
            self.sync_gradients()
            since.mean_grads, finite = facade.scale_and_check(since.mean_grads, np.float32(factor))
            since.are_finite = bool(local_value(finite))
        return since.are_finite

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the mean gradients so that their norm over all parameters is at most `max_norm`; returns the
        norm before. All ranks call it together, after `backward`. As torch.nn.utils.clip_grad_norm_.
        """
        self.sync_gradients()
        clipped, norm = facade.clip_by_norm(self._since.mean_grads, np.float32(max_norm))
        self._since.mean_grads = clipped
        return float(local_value(norm))

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Gradients are reduced by `hook` (`comm_hooks`) from now on."""
        self._state.use_hook(comm_hooks.resolve(state, hook))

    def init(self, inputs: PyTree) -> None:
        """Draws the parameters for inputs like these, and broadcasts rank 0's. All ranks call it."""
        drawn = values.first_values(self._fns, self._seed, inputs)
        if self.get_world_size() > 1:
            agree(self._group, "DistributedDataParallel(model)", drawn)
            drawn = collectives.broadcast(drawn) if self._config.broadcast_parameters else drawn
        self._state.place(TrainState._make([np.int32(0), *drawn, None, self._key()]))
        self._push()

    def parameters(self) -> PyTree:
        """The parameters as host arrays. Raises: GroupError before a model that needs inputs has seen any."""
        self._pull()
        found = jax.tree.map(local_value, self._state.whole.params)
        first = jax.tree.leaves(found)[0]
        self._returned = weakref.ref(first)
        makers.note(first, self)
        return found

    def made(self, array: Any) -> bool:
        """Whether `array` is of the output awaiting its backward, or the first of the last `parameters()`."""
        return any(array is one for one in (*jax.tree.leaves(self._since.output), self._returned()))

    def state_dict(self) -> dict[str, PyTree]:
        """Host arrays {"step", "params", "model_state", "optimizer"}, without what a hook has not sent."""
        self._pull()
        state = self._state.whole
        held = {"step": state.step, "params": state.params, "model_state": state.model_state}
        return jax.tree.map(local_value, held | {"optimizer": state.sync[1]})

    def load_state_dict(self, saved: dict[str, PyTree]) -> None:
        """Continues from what `state_dict` returned, or a part of it, such as {"params": params}; all ranks
        call it together, with equal values. Raises: DataError for another name."""
        kept = values.whole_state(saved, self.state_dict)
        self._since = Gathered()
        self._state.place(TrainState._make([*kept, self._key()]))
        self._push()

    @property
    def training(self) -> bool:
        """Whether dropout and batch statistics are on: the mode of the model itself, where it has one."""
        return self._model_sync.training

    def train(self, mode: bool = True) -> "DistributedDataParallel":
        """Turns dropout and batch statistics on (`mode=False`: off), in the model too; returns itself."""
        self._model_sync.training = mode
        return self

    def eval(self) -> "DistributedDataParallel":
        """Turns dropout off, uses running statistics, and keeps nothing for backward; returns itself."""
        return self.train(False)

    def get_model(self) -> Any:
        """The wrapped model; nnx models and SequentialModel hold the trained values."""
        return self._model

    module = property(get_model)  # torch's name

    def is_master(self) -> bool:
        return self._group.topology.is_master

    def get_rank(self) -> int:
        return self._group.topology.rank

    def get_world_size(self) -> int:
        return self._group.topology.world_size

    def _key(self) -> jax.Array:
        """The key of random draws, rank 0's on all ranks, which call it together: seeds may differ."""
        key = jax.random.key_data(jax.random.key(self._seed))
        return collectives.broadcast(key) if self.get_world_size() > 1 else key

    def _pull(self) -> None:
        """Copies values that were set in the wrapped model into the state."""
        values.refuse_in_loss_of(self)
        if (given := self._model_sync.pull(self.get_world_size())) is not None:
            self._state.set_values(*given)
            self._push()

    def _push(self) -> None:
        """Writes the state's values into the wrapped model."""
        self._model_sync.push(self._state.on_one_device)
