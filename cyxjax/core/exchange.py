"""One exchange for everything that a step sums over replicas, where each array would be a separate transfer.

Over gloo (several processes on CPUs) an all-reduce of many arrays is one instruction of the program and still
a transfer for each array, and a small transfer costs its latency: two processes, 784-256-10, batch 64: 18 k
samples/s with four gradients and the metrics apart, 47 k together. On GPU and TPU XLA joins them itself.

Callers use `lax.psum` as usual: `joined` finds the reductions in the traced function and sends them together.
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
from cyxjax.core.trees import PyTree

# A larger array goes alone: a copy would cost more than the transfer that it saves.
_ALONE_BYTES = 1 << 20
# XLA on CPU (jax 0.10.2, 0.11.2) fuses a concatenation of up to eight arrays with what is around it, and from
# 256 KiB on its threads compute that number by number: 0.8 MB in 12 ms. Of nine arrays it takes 0.05 ms.
_NOT_FUSED = 9
_FUSED_BYTES = 1 << 16
# Gloo (jax 0.10.2) sends a large message only after it has received the peer's, unless the message fits into
# the socket's buffer. Measured at 100 Mbit/s, 4 MB each way: 632 ms whole, 334 ms in 16 pieces; ideal 320 ms.
_PIECE_BYTES = 512 * 1024
_MOST_PIECES = 64  # each is an instruction of the program, and costs 2 ms where the wire is fast
# What a replica receives at most in a transfer of whole vectors; above it an all-reduce is as quick, and on a
# slow wire quicker. Two processes, all-reduce and gathered: 8 kB 1.5 and 0.5 ms, 0.8 MB 2.7 and 1.6 ms, 4 MB
# 4.3 and 4.4 ms; at 1 Gbit/s 8.2 and 4.0, 12.7 and 8.2, 39 and 47 ms.
_GATHERED_BYTES = 1 << 20
_one_by_one: ContextVar[bool] = ContextVar("sends_one_by_one", default=False)
_SUMS = ("psum", "psum_invariant")  # the second is what `lax.psum` is in a checked map


def sends_one_by_one(mesh: Mesh) -> bool:
    """Whether the arrays of one all-reduce are as many transfers: over gloo they are."""
    devices = mesh.devices.flat
    return devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1


def over(mesh: Mesh) -> AbstractContextManager[None]:
    """What is traced inside travels between the processes of `mesh`."""
    return holding(_one_by_one, sends_one_by_one(mesh))


def reduce_scattered(rows: jax.Array) -> jax.Array:
    """(n,), the sum over replicas of their rows for this one; rows: (R, n). Inside a map.

    Over gloo XLA's own takes twice as long as an all-reduce of the same rows, and this half as long: two
    processes, 38 MB, CPU time 114, 66 and 55 ms. Between devices of one process XLA's own copies nothing.
    """
    if not _one_by_one.get():
        return lax.psum_scatter(rows, AXIS, scatter_dimension=0)
    # Added up at once: fused with the optimizer a sum would wait for all gradients, and its rows with it.
    added = lambda piece: reduce(jnp.add, lax.all_to_all(piece, AXIS, 0, 0))  # noqa: E731
    return lax.optimization_barrier(in_pieces(added, rows))


def in_pieces(collective: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """`collective(values)`, over gloo cut along the last dimension, which the collective must leave alone."""
    size = values.shape[-1]
    count = min(_MOST_PIECES, -(-size * values.dtype.itemsize // _PIECE_BYTES), size)
    if count <= 1 or not _one_by_one.get():
        return collective(values)
    # The barriers: a copy that is fused with what makes or uses the pieces costs twice its time.
    pieces = jnp.array_split(lax.optimization_barrier(values), count, axis=-1)
    done = lax.optimization_barrier([collective(piece) for piece in pieces])
    return concatenated(done)[..., :size]


def joined(f: Callable) -> Callable:
    """`f`, whose sums over axis `data` travel together: those that need not wait for each other at once.

    For use inside a map. A number's bits do not depend on what it travels with, so that a program that sends
    gradients alone and one that sends metrics along agree. Branches of a `cond` have exchanges of their own;
    sums inside loops stay as they are.
    """

    def run(*args: Any) -> Any:
        traced, flat, structure = trace(f, *args)
        return jax.tree.unflatten(structure, _run(traced, *flat))

    return run


def trace(f: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Any]:
    """(the equations of `f(*args)`, the leaves they are given, the tree of what they make)."""
    flat, structure = jax.tree.flatten(args)
    made: list[Any] = []

    def leaves(*flat: Any) -> list[Any]:
        out, tree = jax.tree.flatten(f(*jax.tree.unflatten(structure, flat)))
        made.append(tree)
        return out

    return jax.make_jaxpr(leaves)(*flat), flat, made[0]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The operations of a traced function, and of the functions that it calls."""
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from equations(inner)


def _run(traced: Any, *args: Any) -> list[Any]:
    """The traced function in rounds: all that can be computed, then all sums that can be sent."""
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
    """What a traced equation gives for `values`."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def summed(values: list[jax.Array]) -> list[jax.Array]:
    """The sums over replicas of all `values`: of the large ones alone, of the others in a buffer a dtype."""
    # Arrays in, arrays out, as around an all-reduce of each: what computes a number and what uses it would
    # otherwise fuse with the buffer, and round as its layout has it, not as the facade's programs do.
    values = lax.optimization_barrier(values)
    out: list[Any] = [lax.psum(v, AXIS) if v.nbytes > _ALONE_BYTES else None for v in values]
    small = [i for i, done in enumerate(out) if done is None]
    flat = [values[i].astype(_sum_dtype(values[i])).reshape(-1) for i in small]
    for i, part in zip(small, together(flat, [part.dtype for part in flat], _sum_of), strict=True):
        out[i] = part.reshape(values[i].shape).astype(values[i].dtype)
    return lax.optimization_barrier(out)


def together(leaves: Sequence[jax.Array], kinds: Sequence[Any], collective: Callable) -> list[Any]:
    """`collective` of all leaves of one kind, joined along their last dimension; its results by leaf.

    kinds: of the leaves; those that may be joined have equal ones, so one dtype at least.
    """
    out: list[Any] = [None] * len(leaves)
    for kind in dict.fromkeys(kinds):
        mine = [i for i, one in enumerate(kinds) if one == kind]
        done = collective(concatenated([leaves[i] for i in mine]))
        for i, piece in zip(mine, cut(done, [leaves[i].shape[-1] for i in mine]), strict=True):
            out[i] = piece
    return out


def concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    """`arrays` joined along their last dimension; at the end up to seven copies of their last number.

    The copies make large ones nine arrays: see `_NOT_FUSED`. Constants would not do, XLA joins equal ones.
    """
    filled = [array for array in arrays if array.size]
    fused = len(filled) > 1 and sum(array.nbytes for array in filled) > _FUSED_BYTES
    copies = [filled[-1][..., -1:]] * (_NOT_FUSED - len(filled)) if fused else []
    return jnp.concatenate([*arrays, *copies], axis=-1)


def cut(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Inverse of `concatenated`: pieces of `sizes` along the last dimension."""
    return jnp.split(joined, np.cumsum(sizes), axis=-1)[:-1]


def raveled(tree: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """As `jax.flatten_util.ravel_pytree`, with the copies of `concatenated` at the end."""
    leaves, structure = jax.tree.flatten(tree)
    dtype = jnp.result_type(*leaves)

    def unravel(flat: jax.Array) -> PyTree:
        pieces = zip(cut(flat, [leaf.size for leaf in leaves]), leaves, strict=True)
        return jax.tree.unflatten(structure, [p.reshape(leaf.shape).astype(leaf.dtype) for p, leaf in pieces])

    return concatenated([leaf.astype(dtype).reshape(-1) for leaf in leaves]), unravel


def _sum_dtype(value: jax.Array) -> Any:
    # As XLA on CPU sums 16-bit floats too, rounding once at the end.
    return jnp.dtype(jnp.float32) if value.dtype in (jnp.bfloat16, jnp.float16) else value.dtype


def _sum_of(flat: jax.Array) -> jax.Array:
    """The sum over replicas of a vector, each number added in the order of replicas.

    A short vector goes whole to every replica, which adds up what it received: one transfer, where gloo's
    all-reduce goes around a ring step by step. Of a long one each replica adds up one part, and hands it to
    all: the same bytes on the wire as an all-reduce, which goes around a ring and starts each stretch of the
    vector at another replica: from three on a number's bits would depend on its place.
    """
    count = lax.axis_size(AXIS)
    if flat.nbytes * (count - 1) <= _GATHERED_BYTES:
        # Also its own comes out of the collective: every replica adds the same numbers in the same program.
        return reduce(jnp.add, lax.all_gather(flat, AXIS, to="invarying"))
    if count <= 2:  # a + b is b + a
        return lax.psum(flat, AXIS)
    rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    mine = reduce_scattered(rows)
    return lax.all_gather(mine, AXIS, to="invarying").reshape(-1)[: flat.size]
