"""What collectives send: a tree as arrays that arrive unchanged, and its shapes for ranks without a value.

Leaves that jax cannot hold (64-bit numbers while x64 is off, complex numbers) are sent as their bytes:
converted to 32 bits they would arrive changed, without an error. They are returned as exact numpy arrays.

Called as a statement, as in torch, a collective writes its result into the array passed, or raises an error:
a jax array is immutable, so `all_reduce(x)` on a line of its own would change nothing without an error. A
writable numpy array is filled. Whether the result is used is read from the caller's next instruction.
"""

import dis
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.trees import PyTree
from cyxjax.errors import DataError


def as_arrays(tree: PyTree) -> PyTree:
    """`tree` with numbers and lists' items as arrays."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), tree)


def is_wide(leaf: Any) -> bool:
    """True for an array that jax would narrow, or whose reductions it lacks."""
    return leaf.dtype.kind == "c" or jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype


def pack(tree: PyTree) -> PyTree:
    """`tree` with wide leaves as uint8, their shape and the item's size."""
    return jax.tree.map(_pack, tree)


def unpack(tree: PyTree, like: PyTree) -> PyTree:
    """Inverse of `pack`; `like` has the dtypes that went in."""
    return jax.tree.map(_unpack, tree, like)


def _pack(leaf: Any) -> Any:
    if not is_wide(leaf):
        return leaf
    host = np.ascontiguousarray(leaf)
    return host.reshape(-1).view(np.uint8).reshape(*leaf.shape, leaf.dtype.itemsize)


def _unpack(leaf: Any, like: Any) -> Any:
    if not is_wide(like):
        return leaf
    return np.array(leaf).reshape(-1).view(like.dtype).reshape(like.shape)


def zeros(kind: str) -> np.ndarray:
    """A host array of zeros; `kind` is its dtype and shape, such as "float32[2,3]"."""
    dtype, _, shape = kind.removesuffix("]").partition("[")
    return np.zeros([int(size) for size in shape.split(",") if size], jnp.dtype(dtype))


# ---- what the caller wants filled ------------------------------------------------------------------------


def target_in_place(x: PyTree, call: str) -> PyTree:
    """`x`, which is to be filled. Raises: DataError for a value that cannot be."""
    leaves = jax.tree.leaves(x)
    if not leaves or not all(map(_is_writable, leaves)):
        raise DataError(
            f"the result is not used (expected: {call}), and {x!r:.80} cannot be changed in place. "
            f"HINT: write {call}, or pass a writable numpy array."
        )
    return x


def fill(target: PyTree | None, result: PyTree) -> PyTree:
    """`result`, written into `target` too, where there is one. Raises: numpy's ValueError or TypeError."""
    for array, value in zip(jax.tree.leaves(target), jax.tree.leaves(result), strict=False):
        if array.shape != np.shape(value):  # numpy would broadcast it
            raise ValueError(
                f"the array to fill has the shape {array.shape}, the result {np.shape(value)}. HINT: pass an "
                "array of the result's shape."
            )
        np.copyto(array, np.asarray(value), casting="same_kind")
    return result


def fill_list(out: list, rows: list[PyTree]) -> None:
    """Writes all ranks' rows into torch's list: into its writable numpy arrays, in place of other items."""
    for i, (into, row) in enumerate(zip(out, rows, strict=True)):
        if jax.tree.leaves(into) and all(map(_is_writable, jax.tree.leaves(into))):
            fill(into, row)
        else:
            out[i] = row


def thrown_away(code: CodeType, at: int) -> bool:
    """Whether the value of the call at `at` (bytes into `code`) is dropped by the next instruction."""
    for one in dis.get_instructions(code):
        if one.offset <= at or one.opname in ("CACHE", "NOP", "PRECALL"):
            continue
        if one.opname != "JUMP_FORWARD":  # as after `f(x) if several else None`
            return one.opname == "POP_TOP"
        at = one.argval - 1
    return False


def _is_writable(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.flags.writeable
