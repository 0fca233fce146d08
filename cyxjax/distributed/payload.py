"""What collectives carry: a tree as arrays that arrive unchanged, and its form for ranks without a value.

Leaves that jax cannot hold (64-bit numbers while x64 is off, complex numbers) travel as their bytes:
converted to 32 bits they would arrive changed, without an error. They come back as numpy, exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.trees import PyTree
from cyxjax.distributed.agreement import leaf_name
from cyxjax.errors import DataError

_KINDS = "biufcV"  # "V": bfloat16 and its relatives


def as_arrays(tree: PyTree) -> PyTree:
    """`tree` with numbers and lists' items as arrays. Raises: DataError naming a leaf that is no array."""
    return jax.tree_util.tree_map_with_path(_as_array, tree)


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


def _as_array(path: Any, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    array = np.asarray(leaf) if not isinstance(leaf, jax.Array) else None
    if array is None or array.dtype.kind not in _KINDS or array.dtype.names:
        raise DataError(
            f"leaf {leaf_name(path)} is {leaf!r:.80}, expected an array of numbers or booleans. "
            "HINT: broadcast_object and all_gather_object take texts, lists and dicts; "
            "jax.random.key_data makes an array of a key."
        )
    return array


def form_of(tree: PyTree, problem: str = "") -> tuple[Any, str]:
    """(form, "") of a tree of dicts, lists and tuples, or (None, what is wrong)."""
    if problem:
        return None, problem
    try:
        return _form(tree), ""
    except TypeError as error:
        return None, str(error)


def zeros_of_form(form: Any) -> PyTree:
    """A tree of host arrays of that form."""
    kind, inner = form
    if kind == "dict":
        return {name: zeros_of_form(one) for name, one in inner}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(zeros_of_form(one) for one in inner)
    dtype, shape = inner
    return np.zeros(shape, jnp.dtype(dtype))


def _form(tree: PyTree) -> Any:
    if isinstance(tree, dict) and all(isinstance(name, str) for name in tree):
        return ["dict", [[name, _form(tree[name])] for name in sorted(tree)]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_form(one) for one in tree]]
    if hasattr(tree, "dtype") and hasattr(tree, "shape"):
        return ["array", [str(tree.dtype), list(tree.shape)]]
    raise TypeError(f"{type(tree).__name__} cannot be scattered; expected dicts, lists, tuples and arrays.")
