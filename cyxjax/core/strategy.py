"""How the LOCAL gradients of the replicas become the next parameters.

A strategy is a `Sync`; most combine a `Reducer` with an optax optimizer through `reduce_then`. The step
uses nothing else, so a new scheme is one file in `cyxjax/sync/`; tests read the entry at its end."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cyxjax.core.mesh import AXIS, REPLICATED
from cyxjax.core.replica import psum
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree, chunks, times, unchanged, widened

Reducer: TypeAlias = optax.GradientTransformation
"""LOCAL grads -> mean grads over axis `data`, inside `sync_map`; chains with any optax transformation."""


def _whole_already(params: PyTree, dtype: Any) -> PyTree:
    return params


def _one(state: PyTree) -> jax.Array:
    return jnp.float32(1.0)


class Stepped(NamedTuple):
    """The result of one step on a replica."""

    params: PyTree
    state: PyTree
    mean_grads: PyTree = None  # before clipping, for their norm; None: the strategy has no mean of gradients
    in_parts: bool = False  # whether this replica holds only a part of the mean gradients
    counts: Any = True  # bool (), equal on all replicas; False: gradients were not finite, nothing is updated


class Sync(NamedTuple):
    """How one step turns LOCAL gradients into new parameters, seen from one replica.

    `update` returns parameters, not optax's updates: a delta `p + (mean - p)` rounds differently on each
    replica (measured 3.7e-9 apart after averaging parameters); the mean itself does not.
    """

    init: Callable[[PyTree], PyTree]  # params -> state
    # (LOCAL grads, state, params) -> Stepped, or its first two fields
    update: Callable[[PyTree, PyTree, PyTree], Stepped | tuple[PyTree, PyTree]]
    state_spec: PyTree = REPLICATED  # PartitionSpec prefix: P() replicated, P("data") a row per replica
    params_spec: PyTree = REPLICATED  # P("data") while replicas may differ (local SGD), or keep parts (fsdp)
    loss_scale: Callable[[PyTree], Any] = _one  # state -> factor the loss is multiplied by (float16)
    consensus: Callable[[PyTree], PyTree] = unchanged  # a replica's params -> replicated params, to evaluate
    hold: Callable[[PyTree], PyTree] = unchanged  # whole params -> what a replica keeps, in `sync_map`
    # (what it keeps, the dtype the model computes in) -> whole params, in `model_map`; floats in the narrower
    # of that dtype and their own. Differentiated through: LOCAL grads are with respect to what is kept.
    whole: Callable[[PyTree, Any], PyTree] = _whole_already
    regather: bool = False  # whether backward calls `whole` again instead of keeping its result
    # TrainState as kept between steps -> as a step computes with it (`fetch`), and back; in `jit` or outside.
    fetch: Callable[[Any], Any] = unchanged
    stow: Callable[[Any], Any] = unchanged
    # Shapes of (state, what is kept of params), all rows -> as in `mean` and in checkpoints. A leaf with a
    # row per replica whose stored shape differs is cut: the rows in turn hold its elements in C order, and
    # end in padding.
    stored_as: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda state, params: (state, params)

    @property
    def keeps_parts(self) -> bool:
        """Whether a replica keeps parts of the parameters, and the model must gather them."""
        return self.whole is not _whole_already


def loss_factors(
    sync: Sync, state: PyTree, replicas: int, full: int, total: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(factor on a sum of losses, factor on its gradients; None: 1), together `replicas / total` times the
    loss scale. The mean of the gradients over `replicas` is then that of all `total` samples.

    With a loss scale, the first does not grow where a batch has fewer than `full` samples: the scale is as
    large as gradients of full batches allow, so those of short batches would overflow.
    """
    scale = sync.loss_scale(state)
    if sync.loss_scale is _one:
        return replicas / total * scale, None
    return replicas / jnp.float32(full) * scale, full / total


def stepped_if(holds: jax.Array, sync: Sync, grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
    """A step of `sync` if `holds`, bool () and equal on all replicas; else parameters and state are kept.

    It selects results, not branches, so that every step has the same sums over replicas, in one exchange. On
    one CPU device it is a branch: where results are selected, XLA:CPU computes the optimizer's new state
    again to update the parameters, and copies the old one for that (784-2048-2048-10, Adam: 24.5 ms per step,
    20 with a branch; temporaries 70 and 24 MB). On a GPU the host would wait to choose the branch.
    """
    if lax.axis_size(AXIS) == 1 and jax.default_backend() == "cpu":
        return _branched(holds, sync, grads, state, params)
    new = Stepped(*sync.update(grads, state, params))
    params, state = jax.tree.map(lambda n, old: jnp.where(holds, n, old), new[:2], (params, state))
    return new._replace(params=params, state=state)


def _branched(holds: jax.Array, sync: Sync, grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
    """`stepped_if` on one replica, whose own gradients are the mean."""
    made: list[Stepped] = []

    def act(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        made.append(Stepped(*sync.update(grads, state, params)))
        return made[0][:2]

    keep = lambda grads, state, params: (params, state)  # noqa: E731
    params, state = lax.cond(holds, act, keep, grads, state, params)
    mean_grads = None if made[0].mean_grads is None else grads
    return made[0]._replace(params=params, state=state, mean_grads=mean_grads)


def stored_inside(sync: Sync) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """`Sync.stored_as` for a strategy around `sync` that holds its state as `inner`; the rest is kept."""

    def stored_as(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        inner, params = sync.stored_as(state.inner, params)
        return state._replace(inner=inner), params

    return stored_as


def reduce_then(
    reducer: Reducer, optimizer: optax.GradientTransformation, reducer_spec: PyTree = REPLICATED
) -> Sync:
    """Reduces gradients, then passes the mean to `optimizer`: clipping by norm clips the mean's norm."""

    def init(params: PyTree) -> PyTree:
        return reducer.init(params), optimizer.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Stepped:
        reduced, inner = state
        mean_grads, reduced = reducer.update(grads, reduced, params)
        updates, inner = optimizer.update(mean_grads, inner, params)
        return Stepped(optax.apply_updates(params, updates), (reduced, inner), mean_grads)

    return Sync(init, update, state_spec=(reducer_spec, REPLICATED))


# In steps 0, 8, 16, ... of a run. In every step it would add a fifth to a step that is bound by its update
# (1.6 M parameters, Adam, 64 samples, one CPU device: 7.6 ms of CPU time without, 9.3 ms with).
_MEASURED_EVERY = 8


def norm_row(stepped: Stepped, step: jax.Array) -> jax.Array:
    """(norm, 1) in a step that is measured, else zeros; float32 (2,), equal on all replicas. In `sync_map`.

    step: int32 (), the number of steps before this one. The squares of parts are summed over replicas.
    """
    if not jax.tree.leaves(stepped.mean_grads):
        return jnp.zeros(2)
    due = step % _MEASURED_EVERY == 0
    if stepped.in_parts:
        # Summed in each step, as they are few: a branch would keep the gradients of all leaves until it runs.
        squares = jnp.where(due, psum(_squares(stepped.mean_grads)), 0.0)
    elif jax.default_backend() == "gpu":
        # On a GPU the host chooses the branch, and waits for the condition: 784-2048-2048-10 on an H100, 29 k
        # samples per second with a branch, 43 k without one.
        squares = jnp.where(due, _squares(stepped.mean_grads), 0.0)
    else:
        squares = _squares_if(due, jax.tree.leaves(stepped.mean_grads))
    return jnp.stack([jnp.sqrt(squares), due.astype(jnp.float32)])


def written_after(row: jax.Array, stepped: Stepped) -> PyTree:
    """The new parameters, bit for bit, which XLA does not write before the norm in `row` is known.

    The norm needs all gradients, so nothing reads the old parameters any more: XLA overwrites them. Without
    this order it copies those that backward reads, because an update might come first, and keeps the copies
    beside all gradients: the temporaries of a step are 1.5 times as large (784-2048-2048-10, Adam: 38 MiB
    instead of 23). Above 32 MiB glibc requests them from the system in each step, and the new pages cost half
    a step. An `optimization_barrier` does not help: XLA:CPU drops barriers before it looks for copies.
    """
    if stepped.in_parts or not jax.tree.leaves(stepped.mean_grads):
        return stepped.params
    never = row[0] < 0  # never true for a root, but XLA does not know this and waits
    return jax.tree.map(lambda leaf: lax.select_n(never, leaf, lax.full_like(leaf, 0)), stepped.params)


def _squares_if(due: jax.Array, leaves: list[jax.Array]) -> jax.Array:
    """The sum of all squares if `due`, else zero; added leaf by leaf, as in one branch."""
    squares = jnp.float32(0.0)
    for some in chunks(leaves):
        squares = lax.cond(due, _with_squares, _nothing, [squares, *some])
    return squares


def _with_squares(values: list[jax.Array]) -> jax.Array:
    so_far, *grads = values
    return reduce(jnp.add, map(_squares, grads), so_far)


def norm(grads: PyTree, squared: bool = False) -> jax.Array:
    """The norm of all leaves together; 16-bit leaves are summed in float32, whose sums do not stop at 256."""
    each = [_sum_of_squares(leaf) for leaf in jax.tree.leaves(grads)]
    squares = reduce(jnp.add, each) if each else jnp.float32(0.0)
    return squares if squared else jnp.sqrt(squares)


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    wide = widened(leaf)
    is_complex = jnp.iscomplexobj(wide)
    return jnp.sum(jnp.square(wide.real) + jnp.square(wide.imag) if is_complex else jnp.square(wide))


def _squares(grads: Any) -> jax.Array:
    return norm(grads, squared=True).astype(jnp.float32)


def _nothing(grads: list[jax.Array]) -> jax.Array:
    # Zero, with a type that varies over replicas if one of the gradients does.
    return reduce(jnp.add, [lax.full_like(leaf, 0, jnp.float32, shape=()) for leaf in grads])


_row: ContextVar[jax.Array | None] = ContextVar("loss_row", default=None)


def step_value(row: jax.Array) -> AbstractContextManager[None]:
    """Sets the loss for `with_value` and `loss_is_finite`.

    row: float32 (2,), the global batch's sums of losses and weights.
    """
    return holding(_row, row)


def _value() -> jax.Array | None:
    """The loss of the step, float32 (); None outside of a step."""
    if (row := _row.get()) is None:
        return None
    return jnp.where(row[1] > 0, row[0] / jnp.where(row[1] > 0, row[1], 1.0), 0.0)


def loss_is_finite() -> Any:
    """Whether the loss of the step is finite, bool (); True outside of a step."""
    value = _value()
    return True if value is None else jnp.isfinite(value)


def with_value(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` that gets the step's loss, the mean over the global batch, if it takes a `value`."""
    takes = inspect.signature(optimizer.update).parameters
    if "value" not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return optimizer

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        # Outside a step an update is only traced, for its shapes; NaN cannot be taken for a loss.
        value = _value()
        value = jnp.float32(jnp.nan) if value is None else value
        return optimizer.update(grads, state, params, value=value)  # type: ignore[call-arg]

    return optax.GradientTransformation(optimizer.init, update)  # type: ignore[arg-type]  # any state


def shortened(grads: PyTree, norm: jax.Array, max_norm: float | jax.Array) -> PyTree:
    """`grads`, with norm `norm` over all replicas, scaled so that the norm is at most `max_norm`.

    Gradients below it keep their bits. They are multiplied by one factor: optax divides each number by the
    norm (the last bit may differ), and XLA fuses the product into the optimizer but stores quotients.
    Source: optax.clip_by_global_norm.
    """
    factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
    return times(factor, grads)
