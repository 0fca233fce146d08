"""Less device memory: recomputed activations, parameters gathered again, optimizer state on the host.

XLA on CPU (jax 0.10.2) undoes recomputing and regathering without the options below: it drops the barriers,
then removes the computation as a duplicate, and runs all gathers first. `memory_options` returns these
options for a program. With `with_offload` the compiled step moves the optimizer's state in and out, except
leaves of one number per replica. On CPU the host's memory is the devices' memory: the program is the same,
and nothing is saved.
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


def with_remat(fns: ModelFns, policy: str = "full") -> ModelFns:
    """`fns` that keeps between forward and backward only what `policy` saves: the same numbers, less memory.

    policy: none (keeps everything), full (keeps nothing), dots_saveable (keeps matrix products), ... as in
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
    """`policy` that recomputes complex numbers: jax 0.10.2 cannot save any that forward uses too."""

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
    """`fns` that takes the parts of parameters that a replica keeps, and gathers whole ones while it runs.

    With `sync.regather` no whole parameter is kept from forward to backward, and elementwise operations are
    recomputed: without barriers the compiler does this itself, with them it would keep every such array.
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
            # Inside another one, a `jax.checkpoint` saves what the outer policy allows; its own policy has no
            # effect. If the outer policy saves nothing, it is recomputed as it is: one more forward.
            used = (eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(*args).jaxpr))
            own = fns.recomputes or _checkpoint_name() in used
            run = jax.checkpoint(run, policy=None if own else _but_complex(keeps))
        return run(*args)

    return fns._replace(apply=apply)


@functools.cache
def _checkpoint_name() -> str:
    """The name of the operation that `linen.remat` and `nnx.remat` create."""
    return jax.make_jaxpr(jax.checkpoint(lambda x: -x))(0.0).eqns[0].primitive.name


def _is_own_gather(params: dict[str, Any]) -> bool:
    """Whether these belong to a custom_vjp that gathers; a policy sees it only as one operation."""
    inner = params.get("call_jaxpr")
    return inner is not None and any(eqn.primitive.name == "all_gather" for eqn in inner.jaxpr.eqns)


def memory_options(mesh: Mesh) -> dict[str, Any]:
    """Compiler options that recomputing and regathering need to save memory; {} if they need none."""
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",  # runs a gather where it is used
        "xla_disable_hlo_passes": "cse_barrier_expander",  # keeps the second gather separate from the first
    }


def with_offload(sync: Sync, mesh: Mesh, what: str = "optimizer") -> Sync:
    """`sync` whose state is kept in the host's memory. what: optimizer; none: `sync` unchanged.

    The numbers are the same.
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
    """Whether a leaf of a strategy's state moves to the host; single numbers, which hooks read, do not."""
    return math.prod(leaf.shape[1:] if spec == PER_REPLICA else leaf.shape) > 1
