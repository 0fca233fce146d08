"""One exchange for all sums over replicas of a step, where each array would be a separate transfer.

Over gloo (several processes on CPUs) an all-reduce of many arrays is one instruction of the program but one
transfer for each array, and a small transfer costs its latency: two processes, 784-256-10, batch 64: 18 k
samples/s with four gradients and the metrics separate, 47 k together. On GPU and TPU XLA joins them itself.

Callers use `lax.psum` as usual: `with_joint_sums` finds the reductions in the traced function and sends them
together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, subjaxprs
from jax.sharding import Mesh

from cyxjax.core.mesh import AXIS
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree, widened

# A larger array is sent separately: a copy would cost more than the transfer that it saves.
_ALONE_BYTES = 1 << 20
# XLA on CPU (jax 0.10.2, 0.11.2) fuses a concatenation of up to eight arrays with the operations around it,
# and from 256 KiB on computes it number by number: 0.8 MB takes 12 ms, with nine arrays 0.05 ms.
_NOT_FUSED = 9
_FUSED_BYTES = 1 << 16
# Gloo (jax 0.10.2) sends a large message only after it has received the peer's, unless the message fits into
# the socket's buffer. Measured at 100 Mbit/s, 4 MB each way: 632 ms whole, 334 ms in 16 pieces; ideal 320 ms.
_PIECE_BYTES = 512 * 1024
_MOST_PIECES = 64  # each is an instruction of the program and costs 2 ms on a fast network
# The most that a replica receives in a transfer of whole vectors; above it an all-reduce is as fast, and on a
# slow network faster. Two processes, all-reduce and gather: 8 kB 1.5 and 0.5 ms, 0.8 MB 2.7 and 1.6 ms, 4 MB
# 4.3 and 4.4 ms; at 1 Gbit/s 8.2 and 4.0, 12.7 and 8.2, 39 and 47 ms.
_GATHERED_BYTES = 1 << 20
_one_by_one: ContextVar[bool] = ContextVar("sends_one_by_one", default=False)
_SUMS = ("psum", "psum_invariant")  # the second is what `lax.psum` is in a checked map


def sends_one_by_one(mesh: Mesh) -> bool:
    """Whether each array of an all-reduce is a separate transfer, as over gloo."""
    devices = mesh.devices.flat
    return devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1


def over(mesh: Mesh) -> AbstractContextManager[None]:
    """Declares that code traced inside communicates between the processes of `mesh`."""
    return holding(_one_by_one, sends_one_by_one(mesh))


def reduce_scattered(rows: jax.Array) -> jax.Array:
    """(n,), the sum over replicas of their rows for this replica; rows: (R, n). Inside a map.

    Over gloo, XLA's reduce-scatter takes longer than an all-reduce of the same rows, and this one less: two
    processes, 38 MB, CPU time 114, 66 and 55 ms. Between devices of one process XLA's own copies nothing.
    """
    if not _one_by_one.get():
        return lax.psum_scatter(rows, AXIS, scatter_dimension=0)

    def added(piece: jax.Array) -> jax.Array:
        return reduce(jnp.add, widened(lax.all_to_all(piece, AXIS, 0, 0))).astype(piece.dtype)

    # Added up immediately: fused with the optimizer, a sum and its rows would wait for all gradients.
    return lax.optimization_barrier(in_pieces(added, rows))


def in_pieces(collective: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """`collective(values)`; over gloo, in pieces along the last dimension, which the collective must keep."""
    size = values.shape[-1]
    count = min(_MOST_PIECES, -(-size * values.dtype.itemsize // _PIECE_BYTES), size)
    if count <= 1 or not _one_by_one.get():
        return collective(values)
    # Barriers, because a copy that is fused with the producer or user of the pieces takes twice as long.
    pieces = jnp.array_split(lax.optimization_barrier(values), count, axis=-1)
    done = lax.optimization_barrier([collective(piece) for piece in pieces])
    return concatenated(done)[..., :size]


def with_joint_sums(f: Callable) -> Callable:
    """`f` with its sums over axis `data` sent together, if they do not depend on each other.

    For use inside a map. The bits of a number do not depend on what is sent with it, so a program that sends
    only gradients agrees with one that also sends metrics. Branches of a `cond` have their own exchanges;
    sums inside loops are not changed.
    """

    def run(*args: Any) -> Any:
        traced, flat, structure = trace(f, *args)
        return jax.tree.unflatten(structure, _run(traced, *flat))

    return run


def trace(f: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Any]:
    """(the equations of `f(*args)`, the leaves of `args`, the tree structure of the result)."""
    # A new function each time: jax keeps the trace of a function, and `f` may read more than its arguments.
    traced, out = jax.make_jaxpr(lambda *args: f(*args), return_shape=True)(*args)
    return traced, jax.tree.leaves(args), jax.tree.structure(out)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The operations of a traced function, and of the functions that it calls."""
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from equations(inner)


def _run(traced: Any, *args: Any) -> list[Any]:
    """Runs the traced function in rounds: all that can be computed, then all sums that can be sent."""
    known = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    known |= zip(traced.jaxpr.invars, args, strict=True)
    read = lambda v: v.val if isinstance(v, Literal) else known[v]  # noqa: E731
    rest = list(traced.jaxpr.eqns)
    while rest:
        sums: list[tuple[Any, Any]] = []
        later = []
        for eqn in rest:
            if not all(isinstance(v, Literal) or v in known for v in eqn.invars):
                later.append(eqn)
            elif _is_sum(eqn):
                sums += zip(eqn.outvars, map(read, eqn.invars), strict=True)
            else:
                known |= zip(eqn.outvars, _computed(eqn, map(read, eqn.invars)), strict=True)
        if sums:
            known |= zip((name for name, _ in sums), summed([value for _, value in sums]), strict=True)
        rest = later
    return [read(v) for v in traced.jaxpr.outvars]


def _is_sum(eqn: Any) -> bool:
    # Sums over groups of replicas or over another axis are not joined.
    whole = eqn.params.get("axis_index_groups") is None
    return eqn.primitive.name in _SUMS and tuple(eqn.params["axes"]) == (AXIS,) and whole


def _computed(eqn: Any, values: Iterable[Any]) -> list[Any]:
    if eqn.primitive.name == "cond":
        index, *operands = values
        return lax.switch(index, [partial(_run, b) for b in eqn.params["branches"]], *operands)
    return bind(eqn, values)


def bind(eqn: Any, values: Iterable[Any]) -> list[Any]:
    """The results of a traced equation for `values`."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def summed(values: list[jax.Array]) -> list[jax.Array]:
    """The sums over replicas of `values`: large ones separately, the others in one buffer per dtype."""
    # Barriers, as around an all-reduce of each array: otherwise the operations before and after would fuse
    # with the buffer, and round by its layout, not as the programs of hand-written loops do.
    values = lax.optimization_barrier(values)
    out: list[Any] = [lax.psum(v, AXIS) if v.nbytes > _ALONE_BYTES else None for v in values]
    small = [i for i, done in enumerate(out) if done is None]
    # XLA on CPU sums bfloat16 in float32 too, and rounds once at the end.
    flat = [widened(values[i]).reshape(-1) for i in small]
    for i, part in zip(small, together(flat, [part.dtype for part in flat], _sum_of), strict=True):
        out[i] = part.reshape(values[i].shape).astype(values[i].dtype)
    return lax.optimization_barrier(out)


def together(leaves: Sequence[jax.Array], kinds: Sequence[Any], collective: Callable) -> list[Any]:
    """`collective` of all leaves of one kind, joined along their last dimension; its results by leaf.

    kinds: of the leaves; leaves of equal kind are joined, and must have the same dtype.
    """
    out: list[Any] = [None] * len(leaves)
    for kind in dict.fromkeys(kinds):
        mine = [i for i, one in enumerate(kinds) if one == kind]
        done = collective(concatenated([leaves[i] for i in mine]))
        for i, piece in zip(mine, cut(done, [leaves[i].shape[-1] for i in mine]), strict=True):
            out[i] = piece
    return out


def concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    """`arrays` joined along their last dimension, with up to seven copies of the last number at the end.

    The copies make nine arrays of large ones: see `_NOT_FUSED`. Constants do not work: XLA joins equal ones.
    """
    filled = [array for array in arrays if array.size]
    fused = len(filled) > 1 and sum(array.nbytes for array in filled) > _FUSED_BYTES
    copies = [filled[-1][..., -1:]] * (_NOT_FUSED - len(filled)) if fused else []
    return jnp.concatenate([*arrays, *copies], axis=-1)


def cut(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Inverse of `concatenated`: pieces of `sizes` along the last dimension."""
    return jnp.split(joined, np.cumsum(sizes), axis=-1)[:-1]


def raveled(tree: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """(vector, its inverse), as `jax.flatten_util.ravel_pytree`.

    The vector of a large tree is longer than the tree: it ends with the copies of `concatenated`.
    """
    leaves, structure = jax.tree.flatten(tree)
    dtype = jnp.result_type(*leaves)

    def unravel(flat: jax.Array) -> PyTree:
        pieces = zip(cut(flat, [leaf.size for leaf in leaves]), leaves, strict=True)
        return jax.tree.unflatten(structure, [p.reshape(leaf.shape).astype(leaf.dtype) for p, leaf in pieces])

    return concatenated([leaf.astype(dtype).reshape(-1) for leaf in leaves]), unravel


def _sum_of(flat: jax.Array) -> jax.Array:
    """The sum over replicas of a vector, each number added in the order of replicas.

    A short vector is sent whole to every replica, which adds up what it received: one transfer, where gloo's
    all-reduce goes around a ring step by step. For a long vector each replica adds up one part and sends it
    to all. This sends as many bytes as an all-reduce, whose ring starts each part of the vector at another
    replica: with three or more replicas, the bits of a number would depend on its position there.
    """
    count = lax.axis_size(AXIS)
    if flat.nbytes * (count - 1) <= _GATHERED_BYTES:
        # Its own part comes out of the collective too: all replicas add the same numbers in the same program.
        return reduce(jnp.add, lax.all_gather(flat, AXIS, to="invarying"))
    if count <= 2:  # a + b is b + a
        return lax.psum(flat, AXIS)
    rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    mine = reduce_scattered(rows)
    return lax.all_gather(mine, AXIS, to="invarying").reshape(-1)[: flat.size]
