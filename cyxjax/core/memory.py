"""Less device memory: recomputed activations, parameters gathered again, optimizer state on the host.

XLA on CPU (jax 0.10.2) undoes recomputing and regathering without the options below: it drops the barriers
and then finds that it has the values already, and it runs all gathers first. `memory_options` says so, a
program at a time. With `with_offload` the compiled step moves the optimizer's state in and out: all of it
that is more than a number a replica. On CPU the host's memory is the devices': the program is the same, and
nothing is saved.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cyxjax.core.exchange import equations
from cyxjax.core.mesh import HOST_MEMORY, PER_REPLICA
from cyxjax.core.model.model_fns import ModelFns
from cyxjax.core.replica import by_spec
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree

_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}
REMAT = ("none", *_POLICIES)


def with_remat(fns: ModelFns, policy: str = "full") -> ModelFns:
    """`fns` that keeps only what `policy` names between forward and backward; same numbers, less memory.

    policy: none, full (keeps nothing), dots_saveable (keeps matrix products), ... as in
    jax.checkpoint_policies.
    """
    if policy == "none":
        return fns
    kept = _but_complex(_POLICIES[policy])

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        run = jax.checkpoint(lambda p, s, x, k: fns.apply(p, s, x, k, train), policy=kept)
        return run(params, model_state, inputs, key)

    return fns._replace(apply=apply, recomputes=True)


def _but_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """`policy`; complex numbers are computed again: jax 0.10.2 cannot keep any that forward uses too."""

    def keeps(primitive: Any, *given: Any, **params: Any) -> Any:
        makes = primitive.name in ("complex", "fft")
        takes = any(jax.dtypes.issubdtype(a.dtype, np.complexfloating) for a in given if hasattr(a, "dtype"))
        return not makes and not takes and policy(primitive, *given, **params)

    return keeps


GATHERED = "gathered"  # what `Sync.whole` names its results (jax.ad_checkpoint.checkpoint_name)
_MAKES_WHOLE = {
    "all_gather", "concatenate", "slice", "split", "reshape", "transpose", "convert_element_type",
    "broadcast_in_dim", "squeeze",
}  # fmt: skip
_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "copy", "div", "eq", "erf", "exp", "expand_dims", "ge", "gt",
    "integer_pow", "iota", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
    "pad", "pow", "rsqrt", "select_n", "sign", "sqrt", "square", "sub", "tanh",
}  # fmt: skip


def with_whole(fns: ModelFns, sync: Sync) -> ModelFns:
    """`fns` that takes what a replica keeps of the parameters, and makes them whole as it goes.

    With `sync.regather` nothing whole lives from forward to backward, and what one number makes of another is
    computed again: without barriers the compiler does so itself, behind them it would keep every such array.
    (jax 0.10.2's own policy `save_anything_except_these_names` saves everything, and unnamed steps of the
    gather can be saved too.)
    """
    if not sync.keeps_parts:
        return fns

    def keeps(primitive: Any, *_: Any, **params: Any) -> bool:
        named = primitive.name == "name" and params.get("name") == GATHERED
        again = primitive.name in _MAKES_WHOLE | _ELEMENTWISE
        return not again and not named and not _is_own_gather(params)

    def apply(params: PyTree, model_state: PyTree, inputs: PyTree, key: jax.Array, train: bool) -> Any:
        run = lambda p, s, x, k: fns.apply(sync.whole(p, fns.computes), s, x, k, train)  # noqa: E731
        args = (params, model_state, inputs, key)
        if sync.regather and train:
            # Inside another, a `jax.checkpoint` keeps what the outer policy lets it keep, and its own policy
            # says nothing. Where the outer keeps nothing it is run again as it is, for one more forward.
            used = (eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(*args).jaxpr))
            own = fns.recomputes or _checkpoint_name() in used
            run = jax.checkpoint(run, policy=None if own else _but_complex(keeps))
        return run(*args)

    return fns._replace(apply=apply)


@functools.cache
def _checkpoint_name() -> str:
    """Of the operation that `linen.remat` and `nnx.remat` make of a part of a model."""
    return jax.make_jaxpr(jax.checkpoint(lambda x: -x))(0.0).eqns[0].primitive.name


def _is_own_gather(params: dict[str, Any]) -> bool:
    """Whether these are a custom_vjp's, which a policy sees from outside alone, and it gathers."""
    inner = params.get("call_jaxpr")
    return inner is not None and any(eqn.primitive.name == "all_gather" for eqn in inner.jaxpr.eqns)


def memory_options(mesh: Mesh) -> dict[str, Any]:
    """Compiler options under which recomputing and regathering save memory; {} where they do without."""
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",  # a gather stands where it is used
        "xla_disable_hlo_passes": "cse_barrier_expander",  # the second gather is not the first
    }


def with_offload(sync: Sync, mesh: Mesh, what: str = "optimizer") -> Sync:
    """`sync` whose state is kept in the host's memory. what: optimizer; none: `sync` as it is.

    The same numbers.
    """
    if what == "none":
        return sync

    def moved_to(kind: str) -> Any:
        def one(leaf: Any, spec: Any) -> Any:
            place = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.device_put(leaf, place) if is_moved(leaf, spec) else leaf

        return lambda state: state._replace(sync=by_spec(one, state.sync, sync.state_spec))

    return sync._replace(
        fetch=moved_to(mesh.local_devices[0].default_memory().kind), stow=moved_to(HOST_MEMORY)
    )


def is_moved(leaf: Any, spec: Any) -> bool:
    """Whether a leaf of a strategy's state moves to the host; what hooks read stays."""
    return math.prod(leaf.shape[1:] if spec == PER_REPLICA else leaf.shape) > 1
